"""The books of `bench round`, on a CPU with models of nothing; its figures need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distspec import config
from distspec.bench import bars
from distspec.bench.report import Row
from distspec.bench.round import Cell, Rounds, measure
from distspec.errors import ConfigError
from distspec.models import random_model
from tests.shapes import TINY

CPU = torch.device("cpu")


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_as_many_as_guesses_are_right(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    monkeypatch.setattr("distspec.bench.round.CONTEXT", 20)
    target, drafter = (random_model(TINY, seed=seed, dtype=torch.float32, device=CPU) for seed in (1, 2))
    options = config.Engine(max_num_seqs=8, num_pages=400, page_size=4)
    for acceptance, tokens in ((0.0, 1.0), (1.0, 4.0)):
        bench = Rounds(target, drafter, options, acceptance, CPU, max_model_len=150)
        assert bench.timed(Cell(2, 3, overlap), 10)[1] == tokens
        assert bench.timed(Cell(8, 0, overlap), 10)[1] == 1.0
        for engine in (bench.target, bench.drafter):
            engine.check()
            assert engine.books.allocator.free == 400
    bench = Rounds(target, drafter, options, 0.8, CPU, max_model_len=150)
    assert 2.0 < bench.timed(Cell(8, 3, overlap), 20)[1] < 3.9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        measure(["llama-1b+llama-1b"], [1], [1], 0.8, 2, config.Engine())


def test_a_picture_shows_each_pair(tmp_path: Path) -> None:
    context = {"over_ar": 1.2, "idle": 0.02}
    rows = [
        Row(f"round/{pair}/{cell.name}", 100.0, "tokens/s", 120.0, 0.8, dict(context))
        for pair in ("one+other", "large+small")
        for cell in (Cell(batch, steps, overlap) for batch in (1, 8) for steps in (0, 4) for overlap in (True, False))
    ]
    bars.draw_rounds(rows, tmp_path / "round.png")
    assert (tmp_path / "round.png").read_bytes().startswith(b"\x89PNG")
