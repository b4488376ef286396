"""The fused draw against sampling.draw; tests/gpu runs the same check compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distspec.kernels.best import best_whole
from distspec.kernels.sample import draw_whole
from distspec.protocol.values import SamplingParams
from distspec.sampling import GREEDY_BELOW, SamplingRows, best, draw
from distspec.sampling.draw import _draw_fused, _perturbed
from tests.unit.kernels.test_elementwise import CPU

pytestmark = pytest.mark.needs("interpreter")


def mixed(rows: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=1, seed=-3 * row % 2**64, choice=row % 3, temperature=(0.0, 0.6, 1.3)[row % 3])
        for row in range(rows)
    ]


def check_draw(rows: int, vocab: int, spread: float, device: torch.device) -> None:
    """Greedy and sampled rows side by side; another token only where the reference all but ties.

    spread 0: the noise decides alone."""
    logits = spread * torch.randn(rows, vocab)
    params = [
        SamplingParams(
            max_tokens=1, seed=(2**64 - 3) * row % 2**64, choice=row % 3, temperature=(0.0, 0.6, 1.3)[row % 3]
        )
        for row in range(rows)
    ]
    keys = SamplingRows.of(params, range(7, 7 + rows), device)
    got = draw_whole(logits.to(device), keys.temperature, keys.integers[:, 1:], GREEDY_BELOW).cpu()
    keys = SamplingRows.of(params, range(7, 7 + rows), CPU)
    scores = _perturbed(logits, keys)
    lost = scores.amax(dim=-1) - scores.gather(1, got[:, None])[:, 0]
    assert float(lost.max()) < 1e-5
    assert int((got != draw(logits, keys)).sum()) <= rows // 100


def check_best(rows: int, vocab: int, most: int, device: torch.device) -> None:
    """Scores of the reference, of tokens that have these scores, the first being the one that is drawn."""
    logits, params = 3 * torch.randn(rows, vocab), mixed(rows)
    there, here = (SamplingRows.of(params, range(rows), where) for where in (device, CPU))
    arguments = logits.to(device), there.temperature, there.integers[:, 1:], GREEDY_BELOW
    tokens, scores = (found.cpu() for found in best_whole(*arguments, most))
    assert torch.equal(tokens[:, 0], draw_whole(*arguments).cpu())
    assert all(len(set(row)) == most for row in tokens.tolist())
    book = torch.log_softmax(_perturbed(logits, here), dim=-1)
    torch.testing.assert_close(scores, best(logits, here, most)[1], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(scores, book.gather(1, tokens), atol=1e-4, rtol=1e-5)


@settings(max_examples=10)
@given(st.integers(1, 4), st.sampled_from([16, 2049, 4999]), st.sampled_from([1, 3, 16]))
def test_the_best_are_the_reference_s(rows: int, vocab: int, most: int) -> None:
    check_best(rows, vocab, most, CPU)


def test_of_masked_rows_the_best_are_what_is_allowed() -> None:
    """Also where that is nothing, and where it is far from the beginning."""
    logits, rows = torch.full((4, 2049), -torch.inf), SamplingRows.of(mixed(4), range(4), CPU)
    for row, tokens in enumerate([[], [3], [2048], [1, 700, 2047, 2048]]):
        logits[row, tokens] = torch.randn(len(tokens))
        kept, scores = best_whole(logits, rows.temperature, rows.integers[:, 1:], GREEDY_BELOW, 8)
        assert sorted(kept[row][scores[row] > -torch.inf].tolist()) == tokens


@settings(max_examples=12)
@given(st.integers(1, 6), st.sampled_from([1, 2, 7, 2048, 4999]), st.sampled_from([0.0, 3.0]))
def test_the_draw_is_the_reference_s(rows: int, vocab: int, spread: float) -> None:
    check_draw(rows, vocab, spread, CPU)


def test_the_noise_keeps_its_fine_steps_at_both_ends() -> None:
    """Flat logits over many tokens: the winner has a u near 1, and is found by the tail of the noise alone."""
    check_draw(40, 4096, 0.0, CPU)


def check_unfit(vocab: int, device: torch.device) -> None:
    """A model that overflows, as some do in float16, says inf and nan: what is drawn is a token all the same, since the
    next step reads its embedding; and one that is a number, where there is any."""
    nothing, rows = (torch.nan, -torch.inf, torch.inf), 18
    logits = torch.randn(rows, vocab)
    for row in range(rows):
        logits[row, row % 2 :: 2 if row < rows // 2 else 1] = nothing[row % 3]
    limits: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_p": 0.9, "min_p": 0.05}, {"top_k": 5, "top_p": 0.5}]
    for limit in limits:
        each = [
            SamplingParams(max_tokens=1, seed=row, temperature=(0.0, 0.7, 1.0)[row // 3 % 3]) for row in range(rows)
        ]
        params = [replace(one, **limit) for one in each]
        drawn = _draw_fused(logits.to(device), SamplingRows.of(params, range(rows), device)).cpu()
        assert ((drawn >= 0) & (drawn < vocab)).all(), limit
        chosen = logits.gather(1, drawn[:, None])[: rows // 2, 0]
        assert (chosen > -torch.inf).all(), limit


def test_what_is_drawn_is_a_token_whatever_logits_say() -> None:
    check_unfit(300, CPU)


@settings(max_examples=3)
@given(st.integers(0, 2**32), st.sampled_from([30, 240]))
def test_truncated_and_greedy_rows_share_a_draw(seed: int, vocab: int) -> None:
    """What a GPU does where some rows are truncated: rows of every kind side by side."""
    params = [
        SamplingParams(
            max_tokens=1,
            seed=seed + row,
            temperature=(0.0, 0.7, 1.2)[row % 3],
            top_k=(0, 5)[row % 2],
            top_p=(1.0, 0.8)[row // 2 % 2],
            min_p=(0.0, 0.05)[row // 4 % 2],
        )
        for row in range(12)
    ]
    rows = SamplingRows.of(params, range(12), CPU)
    logits = 3 * torch.randn(12, vocab, generator=torch.Generator().manual_seed(seed))
    assert int((_draw_fused(logits, rows) != draw(logits, rows)).sum()) <= 1
