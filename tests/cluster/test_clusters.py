"""The files under clusters/, checked by what `ray up` itself runs before it talks to a cloud."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "clusters").glob("*.yaml"))

# CPUs and GPUs of the machine types that we name, from the providers' own lists.
MACHINES: dict[str, dict[str, tuple[int, int]]] = {
    "aws": {"m7i.xlarge": (4, 0), "m7i.2xlarge": (8, 0), "g6.2xlarge": (8, 1), "g6.12xlarge": (48, 4)},
    "gcp": {"n2-standard-4": (4, 0), "n2-standard-8": (8, 0), "g2-standard-8": (8, 1), "g2-standard-48": (48, 4)},
}


def _read(path: Path) -> dict[str, Any]:
    tree = yaml.safe_load(path.read_text())
    assert isinstance(tree, dict)
    return tree


def _commands(cluster: dict[str, Any]) -> list[str]:
    return [command for key, value in cluster.items() if key.endswith("_commands") for command in value]


cluster_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_there_is_a_file_for_each_kind_of_cluster() -> None:
    assert {path.stem for path in FILES} == {"aws", "gcp", "onprem", "single"}


@cluster_file
def test_ray_itself_accepts_the_file(path: Path) -> None:
    prepared = prepare_config(_read(path))
    validate_config(prepared)
    for name, kind in prepared["available_node_types"].items():
        assert 0 <= kind.get("min_workers", 0) <= kind["max_workers"], name


@cluster_file
def test_a_misspelt_key_would_be_refused(path: Path) -> None:
    """Guards the test above: it would mean nothing if Ray let anything pass."""
    with pytest.raises(Exception, match="setup_comands"):
        validate_config(prepare_config(_read(path) | {"setup_comands": []}))


@cluster_file
def test_node_types_are_machines_that_exist_and_say_what_they_have(path: Path) -> None:
    cluster = _read(path)
    provider = cluster["provider"]["type"]
    if provider == "local":
        assert "available_node_types" not in cluster, "the on-premise provider takes none"
        return
    key = {"aws": "InstanceType", "gcp": "machineType"}[provider]
    assert cluster["head_node_type"] in cluster["available_node_types"]
    for name, kind in cluster["available_node_types"].items():
        cpus, gpus = MACHINES[provider][kind["node_config"][key]]
        assert kind["resources"].get("CPU", cpus) <= cpus, name
        assert kind["resources"].get("GPU", 0) == gpus, name


@cluster_file
def test_every_mounted_path_of_the_repository_is_there_and_suffices_to_install(path: Path) -> None:
    mounts = _read(path)["file_mounts"]
    local = {source for source in mounts.values() if not source.startswith("~")}
    assert all((ROOT / source).exists() for source in local)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"distspec", "pyproject.toml", "requirements.lock", project["readme"], *project["license-files"]} <= local
    for remote, source in mounts.items():
        if source in local:
            assert remote == f"~/distspec/{source}"


@cluster_file
def test_torch_goes_first_and_everything_is_pinned(path: Path) -> None:
    installs = [command for command in _read(path)["setup_commands"] if "pip install" in command]
    assert [bool(re.search(r"\btorch\b", command)) for command in installs] == [True, False]
    assert all("-c ~/distspec/requirements.lock" in command for command in installs)
    assert "-e ~/distspec" in installs[-1]


@cluster_file
def test_ray_comes_from_our_environment_and_asks_for_the_token(path: Path) -> None:
    cluster = _read(path)
    for command in _commands(cluster):
        for call in re.findall(r"(\S+)\s+(?:start|stop)\b", command):
            assert call == "~/distspec/.venv/bin/ray", command
        if "ray start" in command:
            assert "RAY_AUTH_MODE=token" in command
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@cluster_file
def test_the_on_premise_provider_gets_what_it_needs(path: Path) -> None:
    """Autoscaler v2 loses the head there, and Ray falls back to 127.0.0.1 on a host without routes (Ray 2.60)."""
    cluster = _read(path)
    if cluster["provider"]["type"] != "local":
        return
    starts = [command for command in _commands(cluster) if "ray start" in command]
    assert starts
    assert all("--node-ip-address=" in command for command in starts)
    assert all("RAY_enable_autoscaler_v2=0" in command for command in starts if "--head" in command)
