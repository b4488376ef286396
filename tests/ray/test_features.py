"""A drafter that reads features, on real actors: they reach the draft pool over gloo, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distspec import models
from distspec.models.draft_checkpoint import random_draft, save_draft
from distspec.models.eagle3 import Eagle3Config
from distspec.workers import fleet as fleets
from distspec.workers.assembly import build
from distspec.workers.fleet import FleetHandle
from distspec.workers.target import TargetWork
from tests.ray.test_fleet import all_tokens, client_of, configuration, idle, kill

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def eagle3(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft model that reads three layers of the tiny target."""
    target = models.load_target(tiny_model, dtype=torch.float32, device=torch.device("cpu"))
    layer = replace(target.config, num_layers=1, tie_embeddings=False, eos_token_ids=())
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    made = Eagle3Config(layer=layer, taps=(0, 1, 2), target_hidden_size=hidden, draft_vocab_size=vocab)
    folder = tmp_path_factory.mktemp("eagle3")
    save_draft(random_draft(made, target, seed=4), folder)
    return folder


async def counters(handle: FleetHandle) -> dict[str, Any]:
    return dict((await handle.status())["counters"])


async def test_features_reach_the_draft_pool_and_survive_its_death(tiny_model: Path, eagle3: Path) -> None:
    drafts = {"drafter": "eagle3", "draft_model": str(eagle3), "topk": 2, "num_speculative_tokens": 3}
    handle = fleets.launch(configuration(tiny_model, "features", speculation=drafts))
    try:
        async with client_of(handle) as client:
            expected = await all_tokens(client, policy="ar")
            for policy in ("sd", "dsi", "ssd", "bvsp"):
                assert await all_tokens(client, policy=policy) == expected
            assert not (await counters(handle)).get("features_lost")
            assert ("draft:0", "draft") in {(span.track, span.name) for span in await handle.trace()}
            for worker in ("draft:0", "verify:0"):
                killed = False

                def once(count: int, worker: str = worker) -> None:
                    nonlocal killed
                    if not killed and count > 5:
                        killed = True
                        kill(handle, worker)

                assert await all_tokens(client, policy="ssd", on_token=once) == expected
                assert killed
                await idle(handle)
        assert not (await counters(handle)).get("faults")
    finally:
        handle.shutdown()


@pytest.mark.parametrize("placement", ["pool", "local"])
def test_every_target_keeps_features_so_that_kv_is_the_same_wherever_it_goes(
    placement: str, tiny_model: Path, eagle3: Path
) -> None:
    drafts = {"drafter": "eagle3", "draft_model": str(eagle3), "placement": placement}
    config = configuration(tiny_model, "taps", speculation=drafts)
    before = torch.get_num_threads()
    for worker in ("prefill:0", "decode:0", "verify:0"):
        work = build(config, worker, before, lambda action: None).work
        assert isinstance(work, TargetWork)
        assert work._engine.runner.taps == (0, 1, 2)
        assert work._engine.pool.features.shape[1] == 3 * work._engine.model.config.hidden_size
