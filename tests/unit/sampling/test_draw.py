from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from distspec.protocol.values import SamplingParams
from distspec.sampling import GREEDY_BELOW, SamplingRows, best, draw, gumbel, process

CPU = torch.device("cpu")

parameters = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


def random_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The same truncation by transformers."""
    out = TemperatureLogitsWarper(params.temperature)(None, logits[None])
    if params.top_k:
        out = TopKLogitsWarper(params.top_k)(None, out)
    if params.top_p < 1:
        out = TopPLogitsWarper(params.top_p)(None, out)
    if params.min_p:
        out = MinPLogitsWarper(params.min_p)(None, out)
    return out[0]


@settings(max_examples=150, deadline=None)
@given(st.lists(parameters.filter(lambda p: p.temperature > 0), min_size=1, max_size=4), st.integers(0, 2**20))
def test_truncation_is_that_of_transformers(params: list[SamplingParams], seed: int) -> None:
    # 3000 tokens, flat and peaked rows: a nucleus may be wider than the first guess
    logits = random_logits(len(params), 3000, seed) * torch.tensor([0.3, 3.0])[torch.arange(len(params)) % 2, None]
    ours = process(logits, SamplingRows.of(params, range(len(params)), CPU))
    for row, param in enumerate(params):
        want = reference(logits[row], param)
        kept, wanted = ours[row].isfinite(), want.isfinite()
        # float sums may put the last token of a nucleus on either side
        assert int((kept ^ wanted).sum()) <= 1
        assert bool(kept.any())
        both = kept & wanted
        assert torch.allclose(ours[row][both], want[both])


def test_the_boundary_of_a_nucleus_is_where_the_definition_puts_it() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in ((0.49, 1), (0.51, 2), (0.74, 2), (0.76, 4), (0.99, 4)):
        params = SamplingParams(max_tokens=1, top_p=top_p)
        assert int(process(logits, SamplingRows.of([params], [0], CPU)).isfinite().sum()) == kept


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_equals_stay_together_and_something_always_stays(limits: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    kept = process(logits, SamplingRows.of([SamplingParams(max_tokens=1, **limits)], [0], CPU)).isfinite()  # type: ignore[arg-type]
    assert kept.tolist() == [[False, True, True, False]]


@settings(max_examples=60, deadline=None)
@given(st.lists(parameters, min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(0, 2**20))
def test_a_row_depends_neither_on_the_batch_nor_on_its_order(params: list[SamplingParams], random, seed: int) -> None:  # type: ignore[no-untyped-def]
    logits = random_logits(len(params), 2000, seed)
    together = draw(logits, SamplingRows.of(params, range(len(params)), CPU)).tolist()
    order = list(range(len(params)))
    random.shuffle(order)
    shuffled = draw(logits[order], SamplingRows.of([params[row] for row in order], order, CPU)).tolist()
    assert shuffled == [together[row] for row in order]
    for row, param in enumerate(params):
        assert draw(logits[row : row + 1], SamplingRows.of([param], [row], CPU)).tolist() == [together[row]]
        if param.temperature == 0 or param.top_k == 1:
            assert together[row] == int(logits[row].argmax())


@pytest.mark.parametrize("vary", ["position", "choice", "seed"])
@pytest.mark.parametrize("limits", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_frequencies_are_the_distribution(vary: str, limits: dict[str, float]) -> None:
    """G-test over one key word, the others fixed; chi-square quantile of 1 - 1e-6."""
    count, vocab = 20_000, 7
    logits = random_logits(1, vocab, 3, scale=1.0)
    params = [
        SamplingParams(
            max_tokens=1,
            seed=2**63 + i if vary == "seed" else 11,
            choice=i if vary == "choice" else 0,
            **limits,  # type: ignore[arg-type]
        )
        for i in range(count)
    ]
    positions = [i if vary == "position" else 40 for i in range(count)]
    rows = SamplingRows.of(params, positions, CPU)
    observed = torch.bincount(draw(logits.expand(count, vocab), rows), minlength=vocab).double()
    p = reference(logits[0].double(), params[0]).softmax(-1)
    assert bool((observed[p == 0] == 0).all())
    seen, expected = observed[p > 0], p[p > 0] * count
    g = 2 * float((seen * (seen / expected).clamp(min=1e-9).log()).sum())
    degrees = len(expected) - 1
    assert g < degrees + 4.75 * math.sqrt(2 * degrees) + 15
    assert g > 0


def test_independent_keys_agree_as_often_as_chance() -> None:
    """Two seeds, choices or positions pick the same token with probability sum p^2."""
    count, vocab = 20_000, 5
    logits = random_logits(1, vocab, 1, scale=0.5).expand(count, vocab)
    chance = float((logits[0].softmax(-1) ** 2).sum())
    base = [SamplingParams(max_tokens=1, seed=4) for _ in range(count)]
    first = draw(logits, SamplingRows.of(base, range(count), CPU))
    for other, shift in (
        (SamplingParams(max_tokens=1, seed=5), 0),
        (SamplingParams(max_tokens=1, seed=4 + 2**63), 0),
        (SamplingParams(max_tokens=1, seed=4, choice=1), 0),
        (SamplingParams(max_tokens=1, seed=4), 1),
    ):
        second = draw(logits, SamplingRows.of([other] * count, range(shift, count + shift), CPU))
        agree = float((first == second).double().mean())
        assert abs(agree - chance) < 6 * math.sqrt(chance / count)


def test_coupled_draws_agree_far_more_often_than_independent_ones() -> None:
    count, vocab = 4000, 50
    p = random_logits(1, vocab, 1, scale=1.0)
    q = p + random_logits(1, vocab, 2, scale=0.2)
    rows = SamplingRows.of([SamplingParams(max_tokens=1, seed=9)] * count, range(count), CPU)
    agree = (draw(p.expand(count, vocab), rows) == draw(q.expand(count, vocab), rows)).double().mean()
    total_variation = 0.5 * float((p.softmax(-1) - q.softmax(-1)).abs().sum())
    # Gumbel coupling agrees with probability at least (1 - d) / (1 + d) (arXiv 2408.07978)
    assert float(agree) > (1 - total_variation) / (1 + total_variation) - 0.03


def ranked(logits: torch.Tensor, params: SamplingParams, position: int) -> list[int]:
    """Tokens of one row as a drafter should rank them, by the definition: what may be drawn by log q + G, the rest by
    log q."""
    if params.temperature < GREEDY_BELOW:
        return sorted(range(len(logits)), key=lambda token: -float(logits[token]))
    rows = SamplingRows.of([params], [position], CPU)
    kept = process(logits[None], rows)[0]
    noisy = kept + gumbel(rows.seed, rows.choice, rows.position, len(logits))[0]
    return sorted(
        range(len(logits)),
        key=lambda token: (not kept[token].isfinite(), -float((noisy if kept[token].isfinite() else logits)[token])),
    )


@settings(max_examples=100)
@given(st.lists(parameters, min_size=1, max_size=4), st.integers(1, 50), st.integers(0, 2**20))
def test_guesses_are_ranked_by_what_would_be_drawn(params: list[SamplingParams], most: int, seed: int) -> None:
    """Whatever is in the batch, the first guess is the draw, and an own nucleus never makes the others arbitrary."""
    logits = random_logits(len(params), 50, seed)
    rows = SamplingRows.of(params, range(len(params)), CPU)
    tokens, scores = best(logits, rows, most)
    assert tokens[:, 0].tolist() == draw(logits, rows).tolist()
    for row, param in enumerate(params):
        assert tokens[row].tolist() == ranked(logits[row], param, row)[:most]
    assert bool(scores.isfinite().all())
    assert bool((scores[:, :-1] >= scores[:, 1:]).all())


@settings(max_examples=100)
@given(st.lists(parameters, min_size=1, max_size=4), st.lists(st.integers(0, 8), min_size=4, max_size=4))
def test_of_a_masked_row_guesses_are_what_is_allowed_and_none_where_that_is_nothing(
    params: list[SamplingParams], allowed: list[int]
) -> None:
    """Whatever is guessed beside these has no finite score."""
    logits = random_logits(len(params), 20, 4)
    for row, count in zip(logits, allowed, strict=False):
        row[count:] = -torch.inf
    found = best(logits, SamplingRows.of(params, range(len(params)), CPU), 20)
    for tokens, scores, count in zip(*found, allowed, strict=False):
        assert sorted(tokens[scores > -torch.inf].tolist()) == list(range(count))


def test_scores_of_guesses_are_their_share_of_all_tokens() -> None:
    logits = random_logits(2, 9, 5)
    params = [SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, temperature=0.5, seed=8)]
    tokens, scores = best(logits, SamplingRows.of(params, [3, 4], CPU), 9)
    assert scores.exp().sum(dim=-1).tolist() == pytest.approx([1.0, 1.0])
    alone = SamplingRows.of(params[1:], [4], CPU)
    noisy = logits[1] / 0.5 + gumbel(alone.seed, alone.choice, alone.position, 9)[0]
    want = torch.stack([logits[0].log_softmax(-1), noisy.log_softmax(-1)]).gather(1, tokens)
    assert torch.allclose(scores, want, atol=1e-5)


def test_a_drafter_with_trees_covers_more_of_a_narrow_target_than_chance() -> None:
    """What the drafter's own nucleus leaves out is still guessed in the order of its probability."""
    count, vocab = 500, 40
    p = random_logits(count, vocab, 1)
    q = p + random_logits(count, vocab, 2, scale=1.0)
    rows = SamplingRows.of([SamplingParams(max_tokens=1, seed=9, top_k=1)] * count, range(count), CPU)
    drawn = draw(p, rows)[:, None]
    tokens, _ = best(q, rows, 3)
    hits = (tokens == drawn).double().mean(dim=0)
    assert float(hits[1]) > 4 / vocab
    assert float(hits[0]) > float(hits[1]) > float(hits[2]) > 1 / vocab
