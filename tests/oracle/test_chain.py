"""Any parameters, one answer: random combinations of them, served by random fleets, against the chain by the book.

Every fleet serves requests with seeds of their own, one seed for several, and greedy ones side by side.
"""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams
from distspec.sampling import edited
from tests import chain
from tests.causal import logits
from tests.fleet import Stream
from tests.matrix import DRAFTERS, LONG, PAGES, POLICIES, READERS, REPEATED, SHAPE, TREES, Cell
from tests.teacher import excused, plain
from tests.told import check

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 20


def wish(random: Random) -> SamplingParams:
    params = SamplingParams(
        max_tokens=TOKENS,
        seed=random.choice([7, random.getrandbits(64)]),
        choice=random.randrange(3),
        temperature=random.choice([0.0, 0.4, 1.0, 1.8]),
        top_k=random.choice([0, 0, 3, 30]),
        top_p=random.choice([1.0, 0.95, 0.6]),
        min_p=random.choice([0.0, 0.0, 0.05]),
        stop_token_ids=tuple(random.sample(range(SHAPE.vocab_size), random.choice([0, 2, 20]))),
        logprobs=random.choice([None, 0, 1, 5, 20]),
    )
    if random.random() < 0.25:
        stops = (*params.stop_token_ids[:2], chain.END)
        params = replace(params, constraint=random.choice(list(chain.WORDS)), stop_token_ids=stops)
    return chain.wish(random, params, SHAPE.vocab_size) if random.random() < 0.8 else params


def place(random: Random, policy: str) -> Cell:
    colocated = random.random() < 0.5
    drafter = random.choice([*DRAFTERS, *READERS])
    return Cell(policy, random.randrange(3), drafter, colocated, random.choice(PAGES), random.choice(list(TREES)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_any_parameters_give_the_plain_targets_answers(seed: int, policy: str, target: Llama) -> None:
    random = Random(f"{policy} {seed}")
    fleet, asked = place(random, policy).fleet(target, seed=seed), {}
    for number in range(8):
        text = random.choice([LONG, REPEATED])
        asked[str(number)] = text[: random.randint(1, len(text))], wish(random)
        fleet.submit(str(number), *asked[str(number)])
    fleet.run()
    assert any(edited(params) for _, params in asked.values())
    for key, (prompt, params) in asked.items():
        tokens, reason = plain(target, prompt, params)
        if (fleet.streams[key].tokens, fleet.streams[key].finished) != (tokens, reason):
            assert excused(target, prompt, fleet.streams[key].tokens, params) > 0
        check_logprobs(target, prompt, fleet.streams[key], params)


def check_logprobs(target: Llama, prompt: tuple[int, ...], stream: Stream, params: SamplingParams) -> None:
    """One for each token, of the distribution that the plain target has there."""
    text = [*prompt, *stream.tokens]
    scores = logits(target, text)
    assert len(stream.logprobs) == (0 if params.logprobs is None else len(stream.tokens))
    for at, said in enumerate(stream.logprobs, start=len(prompt)):
        check(said, scores[at - 1], text[at], params.logprobs or 0)


@pytest.mark.parametrize("policy", ["sd", "ssd", "bvsp"])
def test_a_penalty_that_forgot_the_drafts_would_be_found(
    policy: str, target: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that counts only what is committed gives other answers, as soon as drafts are judged with it."""
    few = tuple(range(20, 30))  # or no token would come up again so soon
    params = SamplingParams(max_tokens=TOKENS, seed=3, frequency_penalty=1.5, allowed_token_ids=few)
    right = plain(target, REPEATED, params)[0]
    assert serve(policy, target, params) == right
    monkeypatch.setattr("distspec.kv.sequence.Sequence.path", lambda self, id: ())
    assert serve(policy, target, params) != right


def serve(policy: str, target: Llama, params: SamplingParams) -> list[int]:
    fleet = Cell(policy, 1, "right", False, 4).fleet(target, seed=1)
    fleet.submit("one", REPEATED, params)
    fleet.run()
    return fleet.streams["one"].tokens
