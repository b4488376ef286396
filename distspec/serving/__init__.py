"""Serving: requests, text, HTTP and the driver.

serve run distspec.serving:app config=local
serve deploy deploy/local.yaml
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: Mapping[str, Any]) -> Application:
    """Builds the Ray Serve application. A bad configuration stops here, before any actor is started."""
    from distspec.serving.ingress import application, configuration

    return application(configuration(args))
