"""Logprobs on a GPU: those of a CPU, through graphs and without, and no wait on the way."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from distspec import config
from distspec.engine import Engine, Outcome, Segment
from distspec.models import random_model
from distspec.protocol.values import ROOT, Node, SamplingParams
from distspec.sampling import SamplingRows, draw
from distspec.sampling.logprobs import processed, tell
from tests.shapes import TINY
from tests.unit.kernels.test_truncate import limited
from tests.unit.sampling.test_logprobs import check_fused

pytestmark = pytest.mark.needs("gpu")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SAMPLED = SamplingParams(max_tokens=9, seed=5, temperature=0.8, top_p=0.9, logprobs=5, prompt_logprobs=3)


@pytest.mark.parametrize(("rows", "vocab"), [(64, 5000), (33, 151936)])
def test_the_kernels_tell_what_plain_torch_tells(rows: int, vocab: int) -> None:
    check_fused(rows, vocab, CUDA)


def told(device: torch.device, mode: str, graphs: bool) -> list[Outcome[int]]:
    model = random_model(TINY, seed=5, dtype=torch.float32, device=device)
    options = config.Engine(num_pages=64, max_num_seqs=4, cuda_graphs=graphs, logprobs_mode=mode)  # type: ignore[arg-type]
    engine, prompt = Engine(model, options, device=device), tuple(range(1, 20))
    slots = [engine.open(prompt, params, use_cache=False) for params in (SAMPLED, replace(SAMPLED, logprobs=None))]
    for slot in slots:
        engine.reserve(slot, 40)
    nodes = (Node(id=0, parent=ROOT, token=3), Node(id=1, parent=0, token=4))
    outcomes = engine.step([Segment(slots[0], prompt, nodes, given=prompt[1:]), Segment(slots[1], prompt)])
    return outcomes + engine.step([Segment(slots[0], (), (Node(id=2, parent=1, token=5),))])


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_tells_what_a_cpu_tells(mode: str, graphs: bool) -> None:
    for here, there in zip(told(CPU, mode, graphs), told(CUDA, mode, graphs), strict=True):
        assert (here.root, here.nodes) == (there.root, there.nodes)
        for mine, other in zip([*here.logprobs, *here.given], [*there.logprobs, *there.given], strict=True):
            assert other.logprob == pytest.approx(mine.logprob, abs=1e-3)
            assert [p for _, p in other.top] == pytest.approx([p for _, p in mine.top], abs=1e-3)


def test_nothing_on_the_way_waits_for_the_device() -> None:
    params = [replace(one, logprobs=5) for one in limited(16)]
    logits = torch.randn(16, 5000, device=CUDA)
    rows = SamplingRows.of(params, range(16), CUDA)
    for repeat in range(2):  # the first compiles
        torch.cuda.set_sync_debug_mode("error" if repeat else "default")
        try:
            tokens = draw(logits, rows)
            tell(processed(logits, rows, tokens), tokens, 5).to_host()
        finally:
            torch.cuda.set_sync_debug_mode("default")
