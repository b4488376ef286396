"""What a desk tells of tokens: beside each verdict and each round, and of a prompt once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from distspec.drafters.base import Drafter
from distspec.protocol.codec import unpack_logprobs
from distspec.protocol.messages import Progress, Verdict
from distspec.protocol.values import ROOT, Node, SamplingParams, TokenLogprobs
from distspec.rounds import Reply
from tests.causal import logits
from tests.desks import GREEDY, SEEDED, Guess, bushy, desk, engine, extend, lease, model, oracle, plain, run, wrong

PROMPT = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)
ASKING = replace(GREEDY, logprobs=2, prompt_logprobs=1, prompt_tokens=len(PROMPT))


def check(told: Sequence[TokenLogprobs], text: Sequence[int], start: int, most: int) -> None:
    """Of the tokens of a text from `start` on, as one forward has them."""
    right = logits(model(), list(text)).log_softmax(-1)
    assert len(told) == len(text) - start
    for said, token, row in zip(told, text[start:], right[start - 1 :], strict=False):
        assert said.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [logprob for _, logprob in said.top] == pytest.approx(row.topk(most).values.tolist(), abs=1e-4)


def verdict(replies: Sequence[Reply]) -> Verdict:
    [found] = [reply for reply in replies if isinstance(reply, Verdict)]
    return found


@pytest.mark.parametrize("budget", [2, 5, 64])
def test_a_prompt_is_told_of_whole_however_it_is_cut(budget: int) -> None:
    """Also if its KV is cached; but not again when it is computed again with what was drawn after it."""
    of = desk(engine(page_size=4), budget=budget)
    of.receive(extend(1, PROMPT))
    assert verdict(run(of)).prompt_logprobs == b""
    of.receive(extend(2, PROMPT, ASKING))
    found = verdict(run(of))
    assert found.cached == 0
    check(unpack_logprobs(found.prompt_logprobs), PROMPT, 1, 1)
    check(found.logprobs, (*PROMPT, found.outcomes[0][1]), len(PROMPT), 2)
    of.receive(extend(3, (*PROMPT, 7), ASKING))
    again = verdict(run(of))
    assert again.prompt_logprobs == b""
    assert again.cached > 0


def test_outcomes_are_told_of_in_their_order() -> None:
    of = desk(engine(page_size=4), budget=3)
    nodes = (Node(id=4, parent=ROOT, token=9), Node(id=7, parent=4, token=3), Node(id=9, parent=ROOT, token=5))
    of.receive(extend(1, PROMPT, ASKING, nodes=nodes))
    of.receive(extend(2, PROMPT, replace(ASKING, logprobs=None), nodes=nodes))
    asked, other = [reply for reply in run(of) if isinstance(reply, Verdict)]
    assert (asked.outcomes, other.logprobs) == (other.outcomes, ())
    for said, (node, token), path in zip(asked.logprobs, asked.outcomes, [(), (9,), (9, 3), (5,)], strict=True):
        assert node in (ROOT, 4, 7, 9)
        check([said], (*PROMPT, *path, token), len(PROMPT) + len(path), 2)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "oracle": lambda: Guess(oracle),
    "wrong": lambda: Guess(wrong),
    "bushy": lambda: Guess(bushy),
}


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_rounds_tell_of_what_they_emit(drafter: str, drafts: int, params: SamplingParams) -> None:
    """Beside a lease that does not ask; a stop cuts a round in its middle."""
    whole = plain(PROMPT, params)
    params = replace(params, logprobs=3, stop_token_ids=(whole[9],))
    of = desk(engine(), DRAFTERS[drafter]())
    of.receive(lease(1, PROMPT, params, drafts=drafts))
    of.receive(lease(2, PROMPT, replace(params, logprobs=None), drafts=drafts))
    told: dict[int, list[TokenLogprobs]] = {1: [], 2: []}
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for reply in run(of):
        if isinstance(reply, Progress):
            told[reply.request] += reply.logprobs
            tokens[reply.request] += reply.tokens
    assert tokens[1] == tokens[2] == whole[: whole.index(whole[9]) + 1]
    assert told[2] == []
    check(told[1], (*PROMPT, *tokens[1]), len(PROMPT), 3)
