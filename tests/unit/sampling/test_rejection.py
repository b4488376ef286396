"""Whatever the drafter and the rule: what is kept, or drawn in its place, is distributed as the target says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from distspec.protocol.values import SamplingParams
from distspec.sampling import SamplingRows
from distspec.sampling.rejection import Chain, Drafts, Rule, block, distribution, judge, propose, ratio
from tests.frequencies import SOUND, g_test

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
