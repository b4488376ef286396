"""Synthetic acceptance on the real engine: streams are hashes, guesses are right as often as one says, and all that
would be computed is computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from distspec import config, synthetic
from distspec.drafters.base import Drafter, DraftRow, Proposal
from distspec.drafters.standalone import StandaloneDrafter
from distspec.drafters.synthetic import SyntheticDrafter
from distspec.engine import Guessing, Outcome, Segment
from distspec.engine.synthetic import SyntheticEngine, SyntheticGuesser
from distspec.protocol.messages import Lease, Progress, Verdict
from distspec.protocol.values import ROOT, Node, SamplingParams, Shape
from distspec.rounds import Desk
from tests.desks import CPU, SHAPE, Guess, Ticks, engine, extend, model, run, stream
from tests.growth import Path, paths

PROMPT = (1, 2, 3)
PARAMS = SamplingParams(max_tokens=150, seed=11)
ODDS = (0.6, 0.2, 0.1)


class Counting(SyntheticEngine):
    """Counts the forwards of its own model, and their rows."""

    def __init__(self) -> None:
        super().__init__(model(), config.Engine(page_size=4, num_pages=400), device=CPU)
        self.rows: list[int] = []

    def step(self, segments: Sequence[Segment]) -> list[Outcome[int]]:
        self.rows.append(sum(segment.rows for segment in segments))
        return super().step(segments)


def expected(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    text = list(prompt)
    for _ in range(params.max_tokens):
        text.append(synthetic.outcome(params.seed, params.choice, len(text), text[-1], SHAPE.vocab_size))
    return text[len(prompt) :]


def drafter(inner: Drafter | None = None) -> SyntheticDrafter:
    return SyntheticDrafter(
        inner or Guess(lambda row, text: Proposal((), ())),
        ODDS,
        vocab_size=SHAPE.vocab_size,
        max_model_len=SHAPE.max_position,
    )


def desk(of: SyntheticEngine, local: Drafter | None) -> Desk:
    return Desk(of, local, max_num_batched_tokens=64, clock=Ticks(), odds=ODDS)


def lease(request: int, shape: Shape | None, nodes: int, params: SamplingParams) -> Lease:
    return Lease(request=request, epoch=1, start=0, tokens=PROMPT, params=params, shape=shape, nodes=nodes)


@pytest.mark.parametrize(("steps", "topk", "nodes"), [(0, 1, 0), (1, 1, 1), (3, 1, 3), (3, 3, 8)])
def test_streams_are_those_of_the_hash_whatever_is_drafted(steps: int, topk: int, nodes: int) -> None:
    subject = desk(Counting(), drafter())
    shape = Shape(steps=steps, topk=topk, width=topk) if steps else None
    for request in (1, 2):
        subject.receive(lease(request, shape, nodes, replace(PARAMS, choice=request)))
    replies = run(subject)
    for request in (1, 2):
        assert stream(replies, request) == expected(PROMPT, replace(PARAMS, choice=request))


@pytest.mark.parametrize(("topk", "share"), [(1, 0.6), (2, 0.8), (3, 0.9)])
def test_guesses_are_right_as_often_as_one_says(topk: int, share: float) -> None:
    """One level of topk guesses: a round accepts one of them with the sum of their odds, within 3.3 deviations."""
    subject, rounds, kept = desk(Counting(), drafter()), 0, 0
    for request in range(8):
        subject.receive(lease(request, Shape(steps=1, topk=topk), topk, replace(PARAMS, seed=request)))
    for reply in run(subject):
        assert isinstance(reply, Progress)
        if reply.drafted[0]:
            rounds, kept = rounds + 1, kept + reply.accepted[0]
    assert rounds > 500
    assert abs(kept / rounds - share) < 3.3 * (share * (1 - share) / rounds) ** 0.5


def test_every_forward_of_target_and_drafter_runs_in_full() -> None:
    """Four rows a round at the target; and a draft model computes a row per step, and more for what was accepted."""
    inner = engine(page_size=4, seed=1)
    local = StandaloneDrafter(inner, max_num_batched_tokens=64, max_scratch_nodes=64, max_model_len=SHAPE.max_position)
    asked: list[int] = []

    class Watch:
        def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
            out = local.propose(rows)
            asked.append(len(inner.sequence(0).nodes))
            return out

        def forget(self, request: int) -> None:
            local.forget(request)

        def check(self) -> None:
            local.check()

    of = Counting()
    subject = desk(of, drafter(Watch()))
    subject.receive(lease(1, Shape(steps=3), 3, PARAMS))
    assert stream(run(subject), 1) == expected(PROMPT, PARAMS)
    assert set(of.rows[1:-2]) == {4}
    assert min(asked[:-2]) == 2, "three forwards of a chain: the end of the text, and two nodes with KV"


@pytest.mark.parametrize("odds", [(), (0.6, 0.2, 0.1)], ids=["dynamic", "static"])
def test_a_model_that_makes_its_guesses_up_says_the_same_and_keeps_what_was_accepted(odds: tuple[float, ...]) -> None:
    """As one that only makes guesses up; each node of its tree is computed once, however far the text follows it."""
    options = config.Engine(page_size=4, num_pages=400, max_num_seqs=2)
    of = SyntheticGuesser(model(), options, odds=ODDS, device=CPU)
    subject = StandaloneDrafter(of, max_num_batched_tokens=64, max_scratch_nodes=64, max_model_len=SHAPE.max_position)
    text: Path = PROMPT
    plainly, told, expanded, computed = drafter(), 0, set[Path](), list[int]()

    def counted(segments: Sequence[Segment], most: int, before: Guessing | None) -> Guessing:
        computed.extend(segment.rows for segment in segments)
        return SyntheticGuesser.guess(of, segments, most, before)

    of.guess = counted  # type: ignore[method-assign]
    for steps in (3, 2, 4, 2, 2):
        shape = Shape(steps=steps, topk=3, width=4, nodes=60, odds=odds)
        row = DraftRow(1, told, text[told:], shape, PARAMS)
        [proposal], [wanted] = subject.propose([row]), plainly.propose([row])
        assert proposal == wanted
        found = paths(proposal)
        expanded |= {text + path[:-1] for path in found}
        told, text = len(text), text + next(path for path in found if len(path) == 2)
    assert sum(computed) == len(expanded | {PROMPT[:end] for end in range(1, len(PROMPT))})


def test_outcomes_of_a_driven_tree_are_hashes_of_where_they_stand() -> None:
    subject = desk(Counting(), None)
    tree = (Node(id=5, parent=ROOT, token=3), Node(id=7, parent=5, token=4), Node(id=6, parent=ROOT, token=9))
    [verdict] = [*subject.receive(extend(1, PROMPT, PARAMS, nodes=tree)), *run(subject)]

    def hashed(position: int, last: int) -> int:
        return synthetic.outcome(PARAMS.seed, PARAMS.choice, position, last, SHAPE.vocab_size)

    found = {ROOT: hashed(3, 3), 5: hashed(4, 3), 7: hashed(5, 4), 6: hashed(4, 9)}
    assert isinstance(verdict, Verdict)
    assert dict(verdict.outcomes) == found
