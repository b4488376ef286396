"""What tests of rounds and drafters share: a tiny random model, plain decoding by the book, a desk to talk to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from msgspec import structs

from distspec import config
from distspec.drafters.base import Drafter, DraftRow, Proposal
from distspec.drafters.ngram import NgramDrafter
from distspec.drafters.standalone import StandaloneDrafter
from distspec.engine import Begun, Engine, Flight
from distspec.models import random_model
from distspec.models.llama import Llama
from distspec.protocol.messages import Extend, Lease, Progress, Verdict
from distspec.protocol.values import ROOT, SamplingParams, Shape, finish_reason
from distspec.rounds import Desk, Reply
from distspec.sampling import SamplingRows, draw
from tests.causal import logits
from tests.chain import edited
from tests.shapes import TINY

CPU = torch.device("cpu")
SHAPE = dataclasses.replace(TINY, vocab_size=11, max_position=200)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_tokens=24, temperature=1.0, seed=2**63 + 5, top_p=0.95)
PENALIZED = SamplingParams(
    max_tokens=24, seed=3, prompt_tokens=4, bad_words=((9, 2),), frequency_penalty=1.0, repetition_penalty=1.5
)


@cache
def model(seed: int = 0) -> Llama:
    return random_model(SHAPE, seed=seed, dtype=torch.float32, device=CPU)


def engine(page_size: int = 16, num_pages: int | None = None, slots: int = 8, seed: int = 0) -> Engine:
    """A real engine over a tiny random model. num_pages: what is free of its pool; None: enough for all slots."""
    if num_pages is None:
        pages = slots * -(-SHAPE.max_position // page_size)
        options = config.Engine(page_size=page_size, num_pages=pages, max_num_seqs=slots)
        return Engine(model(seed), options, device=CPU)
    # A pool holds one whole request at least: what is more than num_pages belongs to somebody who never moves.
    options = config.Engine(page_size=page_size, max_num_seqs=slots + 1)
    taken = options.pages_for(SHAPE.max_position)
    made = Engine(model(seed), structs.replace(options, num_pages=num_pages + taken), device=CPU)
    made.reserve(made.open((), GREEDY), taken * page_size)
    return made


@cache
def next_token(of: Llama, text: tuple[int, ...], params: SamplingParams) -> int:
    """What the model draws after `text`: one sequence, no pages, no cache, no batch."""
    scores = edited(logits(of, list(text))[-1], text, params)[None]
    return int(draw(scores, SamplingRows.of([params], [len(text)], CPU)))


def plain(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The stream's tokens, one at a time."""
    text = list(prompt)
    while True:
        text.append(next_token(model(), tuple(text), params))
        if finish_reason(params, len(text) - len(prompt), text[-1]):
            return text[len(prompt) :]


class Ticks:
    """A clock on which every look takes so long: it says 1, 2, 3..."""

    def __init__(self, tick_s: float = 1.0) -> None:
        self.now_s = 0.0
        self._tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s


def desk(of: Engine, drafter: Drafter | None = None, budget: int = 64, overlap: bool = False) -> Desk:
    """overlap False: what a message or a step brings is known when it returns."""
    return Desk(of, drafter, max_num_batched_tokens=budget, clock=Ticks(), overlap=overlap)


def standalone(seed: int, page_size: int = 4, num_pages: int | None = None) -> StandaloneDrafter:
    """A drafter with a model of its own, the target's for seed 0. It can lend its slots."""
    return StandaloneDrafter(
        engine(page_size, num_pages=num_pages, seed=seed),
        max_num_batched_tokens=16,
        max_scratch_nodes=64,
        max_model_len=SHAPE.max_position,
    )


def answer(subject: Desk, message: Extend) -> Verdict:
    """The one reply to a message, once it is computed."""
    replies = [*subject.receive(message), *run(subject)]
    [verdict] = replies
    assert isinstance(verdict, Verdict)
    assert verdict.task == message.task
    return verdict


def guard(of: Desk) -> None:
    """Hold a desk to this: no page is freed that a round in flight may write."""
    rolling = of._loop._rolling
    lender = of._loop._lender.engine if of._loop._lender is not None else None
    engines = [of._engine, *([lender] if isinstance(lender, Engine) else [])]
    launch, begin, finish, flying = rolling.launch, rolling.begin, rolling.finish, dict[int, list[set[int]]]()

    def written(slots: Sequence[int], steps: int) -> list[set[int]]:
        """By engine."""
        rows = [rolling._rows[slot] for slot in slots]
        sides = [[(row.target, row.bound + steps) for row in rows]]
        sides.append([(row.drafter, row.bound + steps) for row in rows if row.drafter is not None])
        return [
            {
                page
                for sequence, end in side
                for page in sequence.pages[sequence.length // one.page_size : -(-end // one.page_size)]
            }
            for one, side in zip(engines, sides, strict=False)
        ]

    def watched(flight: Flight, pages: list[set[int]]) -> Flight:
        read, flying[id(flight)] = flight.read, pages

        def landed() -> list[tuple[int, ...]]:
            del flying[id(flight)]
            return read()

        flight.read = landed  # type: ignore[method-assign]
        return flight

    def launched(slots: Sequence[int], steps: int) -> Flight:
        pages = written(slots, steps)
        return watched(launch(slots, steps), pages)

    def started(slots: Sequence[int], steps: int) -> Begun:
        pages = written(slots, steps)
        begun = begin(slots, steps)
        flying[id(begun)] = pages
        return begun

    def finished(begun: Begun, going: Collection[int]) -> Flight:
        return watched(finish(begun, going), flying.pop(id(begun)))

    rolling.launch, rolling.begin, rolling.finish = launched, started, finished  # type: ignore[method-assign]
    for i, one in enumerate(engines):
        _watch(one, lambda i=i: set[int]().union(*(pages[i] for pages in flying.values())))  # type: ignore[misc]


def _watch(one: Engine, needed: Callable[[], set[int]]) -> None:
    allocator = one.books.allocator
    release = allocator.release

    def spy(pages: Iterable[int]) -> None:
        pages = list(pages)
        release(pages)
        freed = {page for page in pages if not allocator.references(page)}
        assert not freed & needed(), "a round in flight may write to them"

    allocator.release = spy  # type: ignore[method-assign]


def run(of: Desk) -> list[Reply]:
    """Step until nothing is left to do; the books must balance after every step."""
    replies: list[Reply] = []
    for _ in range(10_000):
        if not of.ready():
            return replies
        replies += of.step()
        of.check()
    raise AssertionError("the desk does not come to rest")


def extend(request: int, tokens: Sequence[int], params: SamplingParams = GREEDY, **more: object) -> Extend:
    """The first message of a request."""
    return Extend(request=request, epoch=1, task=request, start=0, tokens=tuple(tokens), params=params, **more)  # type: ignore[arg-type]


def chain(drafts: int) -> dict[str, Any]:
    """What a Lease says for rounds of a chain of so many drafts, 0 for none."""
    return {"shape": Shape(steps=drafts) if drafts else None, "nodes": drafts}


def lease(
    request: int, tokens: Sequence[int], params: SamplingParams = GREEDY, drafts: int = 0, **more: object
) -> Lease:
    """The first message of a request that is leased at once."""
    fields = {**chain(drafts), **more}
    return Lease(request=request, epoch=1, start=0, tokens=tuple(tokens), params=params, **fields)


def stream(replies: Sequence[Reply], request: int) -> list[int]:
    """The tokens of a request's Progress, which must come without a gap."""
    tokens: list[int] = []
    for reply in replies:
        if isinstance(reply, Progress) and reply.request == request:
            assert reply.start == len(tokens)
            tokens += reply.tokens
    return tokens


class Guess:
    """A drafter that knows each text and hands it to `grow`, which says what hangs below it.

    The shape of the row that `grow` sees says how many levels there are by now, not how many more are wanted.
    """

    def __init__(self, grow: Callable[[DraftRow, tuple[int, ...]], Proposal]) -> None:
        self._grow = grow
        self._texts: dict[int, tuple[int, ...]] = {}
        self._levels: dict[int, int] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        out = []
        for row in rows:
            known = self._texts.get(row.request, ())
            assert row.keep <= len(known)
            text = self._texts[row.request] = known[: row.keep] + row.tokens
            levels = self._levels.get(row.request, 0) if text == known else 0
            levels = self._levels[row.request] = min(levels + row.shape.steps, row.shape.depth)
            out.append(self._grow(dataclasses.replace(row, shape=structs.replace(row.shape, steps=levels)), text))
        return out

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)
        self._levels.pop(request, None)

    def check(self) -> None:
        """There are no pages."""


def ngram() -> Drafter:
    return NgramDrafter(config.Ngram(), max_model_len=SHAPE.max_position, device=CPU)


def oracle(row: DraftRow, text: tuple[int, ...]) -> Proposal:
    """What the target will say."""
    tokens: list[int] = []
    for _ in range(min(row.shape.steps, row.shape.nodes)):
        tokens.append(next_token(model(), (*text, *tokens), row.params))
    return Proposal.chain(tokens)


def wrong(row: DraftRow, text: tuple[int, ...]) -> Proposal:
    """What the target will never say at the first position."""
    return Proposal.chain([(token + 1) % SHAPE.vocab_size for token in oracle(row, text).tokens])


def bushy(row: DraftRow, text: tuple[int, ...]) -> Proposal:
    """A tree whose right token is the last of `topk` children (two, if topk is 1) of each node on the right path."""
    tokens: list[int] = []
    parents: list[int] = []
    above, wide, most = ROOT, max(2, row.shape.topk), row.shape.nodes
    for right in oracle(row, text).tokens:
        tokens += [(right + other) % SHAPE.vocab_size for other in range(wide - 1, -1, -1)]
        parents += [above] * wide
        above = len(tokens) - 1
    return Proposal(tuple(tokens[:most]), tuple(parents[:most]))
