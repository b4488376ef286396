"""What the args of a Serve application may be. No cluster: bad ones stop before any actor starts."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from distspec.config import load
from distspec.errors import ConfigError, InvalidValue, UnknownKey
from distspec.serving import app
from distspec.serving.ingress import configuration


@pytest.mark.parametrize(
    "overrides",
    [
        ["pools.verify.replicas=2", "speculation.allowed_policies=[ar, sd]"],
        "pools.verify.replicas=2 speculation.allowed_policies=[ar,sd]",
    ],
)
def test_overrides_are_a_list_or_words(overrides: Any) -> None:
    want = load("local", ["pools.verify.replicas=2", "speculation.allowed_policies=[ar, sd]"])
    assert configuration({"config": "local", "overrides": overrides}) == want


def test_no_args_are_the_default_configuration() -> None:
    assert configuration({}) == load("local")
    assert configuration({"config": "colocated", "overrides": []}) == load("colocated")


@pytest.mark.parametrize(
    ("args", "kind", "says"),
    [
        ({"konfig": "local"}, UnknownKey, r"args\.konfig: unknown key"),
        ({"config": "nowhere"}, ConfigError, "nowhere"),
        ({"overrides": 5}, InvalidValue, r"args\.overrides"),
        ({"overrides": [5]}, InvalidValue, r"args\.overrides"),
        ({"overrides": ["pools.verfy.replicas=2"]}, UnknownKey, r"pools\.verfy"),
        ({"overrides": "engine.page_size=0"}, ConfigError, r"engine\.page_size"),
    ],
)
def test_bad_args_are_named(args: dict[str, Any], kind: type[ConfigError], says: str) -> None:
    with pytest.raises(kind, match=says):
        app(args)


def test_the_files_that_ship_build(pytestconfig: pytest.Config) -> None:
    tree = yaml.safe_load((pytestconfig.rootpath / "deploy" / "local.yaml").read_text())
    [application] = tree["applications"]
    assert application["import_path"] == "distspec.serving:app"
    assert app(application["args"]) is not None
