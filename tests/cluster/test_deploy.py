"""The files under deploy/: Serve configurations, the Kubernetes manifest, the image, the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from distspec.config import load
from distspec.coordinator.observe import Observer
from distspec.trace import Trace

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def _serve_configs() -> dict[str, dict[str, Any]]:
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    return {
        "local.yaml": yaml.safe_load((DEPLOY / "local.yaml").read_text()),
        "kuberay.yaml": yaml.safe_load(service["spec"]["serveConfigV2"]),
    }


def _closed(schema: Any) -> Any:
    """The schema with unknown fields refused where its fields are listed, as `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


def _validate(manifest: dict[str, Any]) -> None:
    schema = _closed(json.loads((Path(__file__).parent / "rayservice.schema.json").read_text()))
    # Kubernetes leaves metadata to its own schema.
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    jsonschema.validate(manifest, schema)


@pytest.mark.parametrize("name", ["local.yaml", "kuberay.yaml"])
def test_ray_serve_accepts_the_configuration_and_so_do_we(name: str) -> None:
    tree = _serve_configs()[name]
    ServeDeploySchema.model_validate(tree)
    for application in tree["applications"]:
        assert application["import_path"] == "distspec.serving:app"
        args = application["args"]
        assert set(args) == {"config", "overrides"}
        load(args["config"], args["overrides"])


def test_the_manifest_fits_the_published_schema() -> None:
    _validate(yaml.safe_load((DEPLOY / "kuberay.yaml").read_text()))


@pytest.mark.parametrize("path", ["spec", "spec.rayClusterConfig", "spec.rayClusterConfig.headGroupSpec.template.spec"])
def test_a_misspelt_field_would_be_refused(path: str) -> None:
    manifest = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    node = manifest
    for key in path.split("."):
        node = node[key]
    node["mispelt"] = 1
    with pytest.raises(jsonschema.ValidationError, match="mispelt"):
        _validate(manifest)


def test_every_worker_of_the_manifest_fits_into_a_pod_beside_the_ingress() -> None:
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    args = _serve_configs()["kuberay.yaml"]["applications"][0]["args"]
    pools = load(args["config"], args["overrides"]).pools
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    cpus = float(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    each = [pools.prefill, pools.decode, pools.verify, pools.draft]
    assert max(pool.num_cpus for pool in each) + 1 <= cpus
    assert sum(pool.replicas for pool in each) <= group["replicas"]


def test_manifest_image_and_lock_name_one_ray_and_one_python() -> None:
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
    assert f"ray=={ray.__version__}\n" in (ROOT / "requirements.lock").read_text()


def test_the_image_copies_what_is_there_and_installs_torch_first() -> None:
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    installs = [line for line in lines if line.startswith("RUN pip install")]
    assert [bool(re.search(r"\btorch\b", line)) for line in installs] == [True, False]
    assert all("-c requirements.lock" in line for line in installs)


def test_the_dashboard_shows_only_metrics_that_a_coordinator_publishes() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"distspec_\w+", target["expr"])
    }
    assert shown <= _published()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def _published() -> set[str]:
    """Series names, as Prometheus sees them, of a coordinator that has counted everything it can count."""
    source = "".join(path.read_text() for path in (ROOT / "distspec" / "coordinator").glob("*.py"))
    counters = dict.fromkeys(re.findall(r'counters\["(\w+)"\]', source), 1)
    snapshot = {"queued": 0, "requests": [], "term": 1, "acceptance": 0.5, "workers": {}, "counters": counters}
    names = set()
    for family in Observer(Trace()).metrics(snapshot):
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        names |= {family.name + suffix for suffix in suffixes}
    return names
