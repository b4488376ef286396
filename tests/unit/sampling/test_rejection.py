"""Whatever the drafter and the rule: what is kept, or drawn in its place, is distributed as the target says."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from distspec.protocol.values import SamplingParams
from distspec.sampling import SamplingRows, draw, rejection
from distspec.sampling.rejection import Chain, Drafts, Rule, block, distribution, judge, propose, ratio
from tests.frequencies import FAULTY, SOUND, g_test

CPU = torch.device("cpu")
VOCAB, TOKENS = 8, 3
REQUESTS = 6000
RULES: dict[str, Rule] = {"ratio": ratio, "block": block}
PARAMS = {
    "plain": SamplingParams(max_tokens=TOKENS, temperature=0.9),
    "top_p": SamplingParams(max_tokens=TOKENS, temperature=1.2, top_p=0.8),
    "top_k": SamplingParams(max_tokens=TOKENS, temperature=1.2, top_k=4),
    "min_p": SamplingParams(max_tokens=TOKENS, temperature=1.2, min_p=0.2),
}
Text = tuple[int, ...]

_TABLES = torch.randn(2, VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.2


def target(texts: list[Text]) -> Tensor:
    """Logits by the last token, or by there being none."""
    return _TABLES[0][[text[-1] if text else VOCAB for text in texts]]


def drafter(texts: list[Text]) -> Tensor:
    """Often right."""
    return target(texts) + 0.8 * _TABLES[1][[text[-1] if text else VOCAB for text in texts]]


def rows_of(params: SamplingParams, texts: list[Text], each: int = 1) -> SamplingRows:
    """`each` rows for every seed, which draw the token after their text."""
    seeds = [replace(params, seed=seed) for seed in range(len(texts) // each) for _ in range(each)]
    return SamplingRows.of(seeds, [len(text) for text in texts], CPU)


def round_of(rule: Rule, params: SamplingParams, texts: list[Text], steps: int) -> tuple[list[Text], int]:
    """One round of all requests: their texts after it, and how many drafts were kept."""
    ends, laws = list(texts), []
    for _ in range(steps):
        tokens, law = propose(drafter(ends), rows_of(params, ends), [len(text) for text in texts])
        laws.append(law)
        ends = [(*end, token) for end, token in zip(ends, tokens.tolist(), strict=True)]
    chains = [
        Chain(i * (steps + 1), end[len(text) :], [law[i] for law in laws])
        for i, (text, end) in enumerate(zip(texts, ends, strict=True))
    ]
    paths = [end[: len(text) + i] for text, end in zip(texts, ends, strict=True) for i in range(steps + 1)]
    found = judge(target(paths), rows_of(params, paths, steps + 1), Drafts.of(chains), rule).view(-1, steps + 1)
    after = [walk(*each) for each in zip(texts, ends, found.tolist(), strict=True)]
    return after, sum(len(text) - len(before) - 1 for text, before in zip(after, texts, strict=True))


def walk(text: Text, end: Text, outcomes: list[int]) -> Text:
    """The text grows by outcomes for as long as they agree with what was drafted."""
    for outcome in outcomes:
        text = (*text, outcome)
        if text != end[: len(text)]:
            break
    return text


def deviation(rule: Rule, params: SamplingParams, steps: int, requests: int = REQUESTS) -> float:
    """How far the first tokens of so many seeds are from the target's joint distribution, in standard deviations."""
    texts: list[Text] = [()] * requests
    for _ in range(TOKENS):
        texts, _ = round_of(rule, params, texts, steps)
    return g_test(Counter(text[:TOKENS] for text in texts), joint(params))


def joint(params: SamplingParams) -> dict[Text, float]:
    exact: dict[Text, float] = {(): 1.0}
    for _ in range(TOKENS):
        paths = list(exact)
        shares = distribution(target(paths), rows_of(params, paths)).tolist()
        exact = {(*p, t): exact[p] * q for p, law in zip(paths, shares, strict=True) for t, q in enumerate(law)}
    return exact


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_joint_of_three_tokens_is_the_targets(rule: Rule, params: SamplingParams, steps: int) -> None:
    assert abs(deviation(rule, params, steps)) < SOUND


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_drafts_drawn_with_the_noise_of_outcomes_are_found(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "apart", lambda choice, position, stream, start: (choice, position))
    assert deviation(rule, PARAMS["plain"], 2) > FAULTY


def test_block_verification_with_noise_that_was_looked_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and coins of a place are the same in every round."""
    monkeypatch.setattr(rejection, "apart", lambda choice, position, stream, _: (choice + (stream << 32), position))
    assert deviation(block, PARAMS["plain"], 4, 4 * REQUESTS) > FAULTY


def left_out(rule: Rule) -> Rule:
    """The place of a refused draft is filled as if none had been refused."""
    return lambda p, q, coins, drafts: (rule(p, q, coins, drafts)[0], p)


def turned(rule: Rule) -> Rule:
    """Each draft is weighed by the law of another."""
    return lambda p, q, coins, drafts: rule(p, q.roll(1, 0), coins, drafts)


@pytest.mark.parametrize("fault", [left_out, turned])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_that_is_wrong_is_found(rule: Rule, fault: Callable[[Rule], Rule]) -> None:
    assert deviation(fault(rule), PARAMS["plain"], 2, REQUESTS // 2) > FAULTY


def kept(rule: Rule, steps: int) -> int:
    """Drafts of first rounds that are kept."""
    return round_of(rule, PARAMS["plain"], [()] * REQUESTS, steps)[1]


def test_a_draft_alone_is_kept_as_often_as_the_distributions_overlap() -> None:
    rows = rows_of(PARAMS["plain"], [()])
    p, q = (distribution(of([()]), rows)[0] for of in (target, drafter))
    chance = float(torch.minimum(p, q).sum())
    bound = 4 * (chance * (1 - chance) / REQUESTS) ** 0.5
    assert abs(kept(ratio, 1) / REQUESTS - chance) < bound
    assert kept(block, 1) == kept(ratio, 1)


def test_blocks_keep_more_of_longer_chains() -> None:
    assert kept(block, 4) > 1.02 * kept(ratio, 4)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_the_target_agrees_with_is_kept(rule: Rule) -> None:
    """p = q, also where it is all on one token."""
    texts: list[Text] = [()] * 200
    for params in (PARAMS["plain"], SamplingParams(max_tokens=TOKENS, temperature=0.0)):
        tokens, laws = propose(target(texts), rows_of(params, texts), [0] * len(texts))
        drafts = Drafts.of([Chain(i, [int(tokens[i])], [laws[i]]) for i in range(len(texts))])
        assert judge(target(texts), rows_of(params, texts), drafts, rule).equal(tokens)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_neighbours_do_not_matter_and_greedy_rows_are_plain(data: st.DataObject) -> None:
    """Chains of any length, some cut off, among rows without drafts; one by one as all together."""
    rule = RULES[data.draw(st.sampled_from(sorted(RULES)))]
    parts = data.draw(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.8])), min_size=1, max_size=5))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits, params, positions, chains = [], list[SamplingParams](), list[int](), list[Chain]()
    for seed, (steps, temperature) in enumerate(parts):
        one = SamplingParams(max_tokens=9, seed=seed, temperature=temperature)
        theirs, ours = torch.randn(2, steps + 1, VOCAB, generator=random) * 2
        tokens, laws = propose(theirs, SamplingRows.of([one] * (steps + 1), range(steps + 1), CPU), [0] * (steps + 1))
        if steps:
            chains.append(Chain(len(params), tokens[:steps].tolist(), list(laws[:steps])))
        logits.append(ours)
        params += [one] * (steps + 1)
        positions += range(steps + 1)
    rows = SamplingRows.of(params, positions, CPU)
    plain = draw(torch.cat(logits), rows)
    found = judge(torch.cat(logits), rows, Drafts.of(chains), rule) if chains else plain
    start = 0
    for scores, (steps, temperature) in zip(logits, parts, strict=True):
        part = slice(start, start + steps + 1)
        mine = [dataclasses.replace(chain, row=0) for chain in chains if chain.row == start]
        alone = SamplingRows.of(params[part], positions[part], CPU)
        assert found[part].equal(judge(scores, alone, Drafts.of(mine), rule) if mine else draw(scores, alone))
        if not temperature:
            drafted = mine[0].tokens if mine else []
            right = next((i for i, token in enumerate(drafted) if token != plain[part][i]), len(drafted))
            assert found[part][: right + 1].equal(plain[part][: right + 1])
        start += steps + 1


FINITE = st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-9, 9, width=32)
SCORES = FINITE | st.sampled_from([0.0, -1e-40, 2.0**99, -torch.inf])
ROW = st.lists(SCORES, min_size=VOCAB, max_size=VOCAB) | st.just([-torch.inf] * VOCAB)
LAWS = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.01, 0.8, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.9, 1e-6]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
)


@settings(max_examples=120, deadline=None)
@given(st.data(), LAWS, LAWS)
def test_whatever_is_masked_laws_are_laws_and_what_is_drawn_is_allowed(
    data: st.DataObject, ours: SamplingParams, theirs: SamplingParams
) -> None:
    """Scores as extreme as penalties make them; a mask may leave the drafter nothing at all, and the target one token.
    The drafter's parameters need not be the target's."""
    rule, steps = RULES[data.draw(st.sampled_from(sorted(RULES)))], data.draw(st.integers(1, 3))
    guessed = torch.tensor(data.draw(st.lists(ROW, min_size=steps + 1, max_size=steps + 1)))
    wanted = guessed[data.draw(st.permutations(range(steps + 1)))].clone()
    for row in wanted:
        row[data.draw(st.integers(0, VOCAB - 1))] = data.draw(FINITE)
    rows, drafted = (SamplingRows.of([of] * (steps + 1), range(steps + 1), CPU) for of in (ours, theirs))
    tokens, laws = propose(guessed, drafted, [0] * (steps + 1))
    nothing = (guessed == -torch.inf).all(dim=-1)
    assert torch.allclose(laws.sum(dim=-1), 1.0 - nothing.float())
    assert bool((laws[guessed == -torch.inf] == 0).all())
    assert bool((laws.gather(1, tokens[:, None])[:, 0] > 0).equal(~nothing))
    found = judge(wanted, rows, Drafts.of([Chain(0, tokens[:steps].tolist(), list(laws[:steps]))]), rule)
    walked = 1 + int((found == tokens)[:steps].long().cumprod(dim=0).sum())
    assert bool((distribution(wanted, rows).gather(1, found[:, None])[:walked] > 0).all())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_draft_that_can_not_have_been_drawn_is_refused_and_costs_nothing(rule: Rule) -> None:
    """What comes in its place is drawn from the whole of the target's distribution."""
    texts: list[Text] = [()] * REQUESTS
    rows = rows_of(PARAMS["plain"], texts)
    drafts = Drafts.of([Chain(i, [0], [torch.zeros(VOCAB)]) for i in range(REQUESTS)])
    found = Counter(judge(target(texts), rows, drafts, rule).tolist())
    law = distribution(target([()]), rows_of(PARAMS["plain"], [()]))[0].tolist()
    assert abs(g_test(Counter({(t,): n for t, n in found.items()}), {(t,): q for t, q in enumerate(law)})) < SOUND


def test_a_drafter_may_know_fewer_tokens() -> None:
    """Its laws end where the tokens begin that it does not know."""
    texts, few = list[Text]([()] * 50), 5
    tokens, laws = propose(drafter(texts)[:, :few], rows_of(PARAMS["plain"], texts), [0] * 50)
    whole = torch.cat((laws, torch.zeros(50, VOCAB - few)), dim=1)
    found = [
        judge(target(texts), rows_of(PARAMS["plain"], texts), Drafts.of(chains), ratio)
        for chains in ([Chain(i, [int(tokens[i])], [law[i]]) for i in range(50)] for law in (laws, whole))
    ]
    assert found[0].equal(found[1])
    assert int(found[0].max()) >= few


def test_no_drafts_are_no_drafts() -> None:
    with pytest.raises(ValueError, match="no drafts"):
        Drafts.of([])
