"""Configurations are loaded without what the environment of the tests happens to set."""

from __future__ import annotations

import os

import pytest

from distspec.config import ENV_PREFIX


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(key)
