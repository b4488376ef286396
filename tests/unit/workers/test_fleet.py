"""A fleet from outside, without Ray: what is told before it starts."""

from __future__ import annotations

import pytest
import ray

from distspec.config import load
from distspec.workers import fleet


@pytest.mark.parametrize(
    ("gpus", "asked", "is_told"),
    [
        (2, [], True),
        (0, [], False),
        (2, ["engine.device=cpu"], False),
        (2, ["engine.device=cuda"], False),
        (2, ["pools.verify.num_gpus=0.5"], False),
    ],
)
def test_whoever_leaves_all_gpus_alone_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: int, asked: list[str], is_told: bool
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0} | ({"GPU": float(gpus)} if gpus else {}))
    monkeypatch.setattr(fleet, "start", lambda config: None)
    fleet.launch(load("local", asked)).close()
    assert ("pools.decode.num_gpus=1" in caplog.text) == is_told
