"""`bench policies` on a real fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from distspec.bench import live
from distspec.bench.prompts import prompts
from distspec.config import load

pytestmark = pytest.mark.usefixtures("cluster")


def configuration(folder: Path, **speculation: Any) -> dict[str, Any]:
    return {
        "name": "compared",
        "model": {"name": str(folder), "max_model_len": 128},
        "engine": {"num_pages": 256, "page_size": 4, "max_num_seqs": 4, "num_threads": 1},
        "speculation": {"allowed_policies": ["ar", "sd"], "num_speculative_tokens": 3, **speculation},
        "coordinator": {"heartbeat_s": 0.2, "worker_timeout_s": 5.0, "lease_s": 15.0},
        "pools": {pool: {"replicas": 1} for pool in ("decode", "draft")},
    }


@pytest.mark.parametrize("placement", ["pool", "local"])
def test_policies_run_in_turn_on_one_fleet_which_is_gone_afterwards(placement: str, tiny_model: Path) -> None:
    """A drafter that is always right: rounds of three drafted tokens and one more, none of them wasted.

    The last round may draft less, since no token is judged that could not be emitted.
    """
    config = load(configuration(tiny_model, placement=placement, synthetic_acceptance=[1.0]))
    plan = live.Plan([2], prompts("10", str(tiny_model)), "10", tokens=29, repetitions=2)
    said: list[str] = []
    rows = {row.name: row for row in live.measure(config, plan, say=said.append)}
    names = ["ar", "sd", "sd112"]
    assert [line.split()[1] for line in said] == [f"{name}:" for name in (*names, *names, *reversed(names))]
    assert list(rows) == [f"policies/{name}/b2/10/a1" for name in names]
    ar, sd, one = (row.context for row in rows.values())
    assert rows["policies/ar/b2/10/a1"].ratio == 1.0
    assert all(row.value > 0 for row in rows.values())
    assert all(context["equal_tokens"] == 1.0 and context["synthetic"] == "1" for context in (ar, sd, one))
    assert [float(context["accepted"]) for context in (ar, sd, one)] == pytest.approx([0, 3, 1], abs=0.1)
    assert all(0 < float(context["target_busy"]) < 1 for context in (ar, sd, one))
    assert ar["draft_busy"] == 0 < min(float(sd["draft_busy"]), float(one["draft_busy"]))
    assert ar["wasted"] == sd["wasted"] == one["wasted"] == 0
    assert not [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "compared" in actor["name"]]
