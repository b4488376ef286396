"""Pages of leased rounds: how much is held ahead of them, and that every page has its holders after every round."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from distspec.drafters.standalone import StandaloneDrafter
from distspec.engine import Engine
from distspec.protocol.messages import Drop, Freed, Lease, Progress, Refused
from distspec.protocol.values import SamplingParams, Shape
from distspec.rounds import Desk, Reply
from tests.desks import (
    GREEDY,
    SEEDED,
    SHAPE,
    Guess,
    bushy,
    desk,
    engine,
    extend,
    lease,
    plain,
    run,
    stream,
    wrong,
)

PROMPT = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)
STEPS = 3


def conserves(of: Engine) -> bool:
    """free + cached + held = total, where each page counts once."""
    of.check()
    cached = set(of.books.cache.pages) if of.books.cache is not None else set()
    held = {page for slot in of._open.values() for page in slot.sequence.pages}
    return of.books.allocator.free + len(cached | held) == of.books.allocator.num_pages


class Book:
    """What a request's pages must be after each round, said a second time and from the replies alone.

    nodes: of each round, drafted or judged. rolls: they roll on the device, where they are a chain of `steps`.
    """

    def __init__(self, message: Lease, page_size: int, rolls: bool) -> None:
        assert message.params is not None
        self.size, self.max_tokens, self.rolls = page_size, message.params.max_tokens, rolls
        self.prompt, self.emitted = len(message.tokens), 0
        shape = message.shape
        self.nodes = max(shape.steps * shape.topk, message.nodes) if shape else 0
        self.steps = min(shape.steps, message.nodes) if shape else 0

    def limit(self) -> int:
        """Positions that two rounds from here need. The last token so far is not computed yet."""
        left = self.max_tokens - self.emitted
        return self.prompt + self.emitted - 1 + min(2, left) * (1 + (self.nodes if left > 1 else 0))

    def check(self, progress: Progress, pages: int, flying: int) -> None:
        """flying: rounds that are launched and not read."""
        began, computed = self.limit(), self.prompt + self.emitted + progress.accepted[0]
        self.emitted += len(progress.tokens)
        first = self.prompt + self.emitted - 1
        if progress.ended and not flying:
            assert pages == -(-computed // self.size), "what is computed"
        elif not self.rolls:
            assert pages == -(-min(began, self.limit()) // self.size), "what was reserved as far as it is still needed"
        else:
            assert pages * self.size >= first + flying * (1 + self.steps), "what is in flight"
            assert pages <= -(-(first + 2 * (1 + self.nodes)) // self.size), "and one round more"


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize(("local", "overlap"), [("bushy", False), ("same model", False), ("same model", True)])
def test_pages_after_every_round(page_size: int, topk: int, local: str, overlap: bool) -> None:
    """Requests that end by length, by a stop token in an accepted run, at the model's last position, and by abort."""
    of = engine(page_size)
    drafter = (
        Guess(bushy)
        if local == "bushy"
        else StandaloneDrafter(
            engine(page_size), max_num_batched_tokens=64, max_scratch_nodes=64, max_model_len=SHAPE.max_position
        )
    )
    subject = desk(of, drafter, budget=512, overlap=overlap)
    shape = Shape(steps=STEPS, topk=topk, width=topk)
    stop = next(token for token in plain(PROMPT, SEEDED)[6:] if token not in plain(PROMPT, SEEDED)[:6])
    long = PROMPT * (SHAPE.max_position // len(PROMPT) - 1)
    messages = [
        lease(1, PROMPT, GREEDY, shape=shape, nodes=5),
        lease(2, PROMPT, replace(SEEDED, stop_token_ids=(stop,)), shape=shape, nodes=9),
        lease(3, long, replace(SEEDED, max_tokens=SHAPE.max_position - len(long) + 1), shape=shape, nodes=5),
        lease(4, PROMPT[3:], SEEDED, shape=shape, nodes=5),
        lease(5, PROMPT[3:], SEEDED),
        lease(6, PROMPT[2:], GREEDY, drafts=1),
    ]
    rolling = {5, *([1, 2, 3, 4, 6] if topk == 1 else [6])} if local == "same model" else {5}
    books = {message.request: Book(message, page_size, message.request in rolling) for message in messages}
    random = Random(page_size * topk)
    replies: list[Reply] = []
    for message in messages:
        assert subject.receive(message) == []
    flown = 0
    while subject.ready():
        said = subject.step()
        replies += said
        for reply in said:
            held = subject._held.get(reply.request) if isinstance(reply, Progress) else None
            if held is not None:
                assert isinstance(reply, Progress)
                books[held.request].check(reply, len(of.sequence(held.slot).pages), held.flying)
                flown = max(flown, held.flying)
        assert conserves(of)
        if random.random() < 0.2 and subject._held.get(4) is not None:
            replies += subject.receive(Drop(request=4, epoch=1))
            assert conserves(of)
    assert flown == overlap
    ends = [reply for reply in replies if isinstance(reply, Progress) and reply.ended and reply.accepted[0]]
    assert {reply.request for reply in ends} >= {2, 3}, "streams end in the middle of what was accepted"
    for message in messages:
        assert message.params is not None
        if subject._held.get(message.request) is not None:
            assert stream(replies, message.request) == plain(message.tokens, message.params)
            replies += subject.receive(Drop(request=message.request, epoch=1))
        assert Freed(request=message.request, epoch=1) in replies
    assert not subject.ready()
    assert not of._open
    assert conserves(of)


# -- when pages are short ------------------------------------------------------------------------------


def refused(subject: Desk) -> tuple[list[int], list[Reply]]:
    replies = run(subject)
    return [reply.request for reply in replies if isinstance(reply, Refused)], replies


def test_one_round_is_enough_where_there_is_no_room_for_two() -> None:
    """The pool holds the text to its last computed token and one round, which is less than two."""
    nodes = 6
    positions = len(PROMPT) + GREEDY.max_tokens - 1 + nodes
    subject = desk(engine(1, num_pages=positions), Guess(wrong))
    subject.receive(lease(1, PROMPT, GREEDY, drafts=nodes))
    gone, replies = refused(subject)
    assert gone == []
    progress = [reply for reply in replies if isinstance(reply, Progress)]
    assert [token for reply in progress for token in reply.tokens] == plain(PROMPT, GREEDY)
    assert all(reply.drafted[0] == min(nodes, GREEDY.max_tokens - reply.start - 1) for reply in progress[1:])


def test_what_is_held_ahead_gives_way_before_drafts_and_drafts_before_a_request() -> None:
    stopping = SamplingParams(max_tokens=40, seed=1, stop_token_ids=(plain(PROMPT, SEEDED)[8],))
    tokens = plain(PROMPT, stopping)
    older = PROMPT[::-1] * 4
    assert 3 < len(tokens) < 20
    subject = desk(engine(1, num_pages=len(older) + len(PROMPT) + len(tokens)), Guess(wrong))
    subject.receive(extend(1, older))
    subject.receive(lease(2, PROMPT, stopping, drafts=30))
    gone, replies = refused(subject)
    assert gone == []
    assert [t for reply in replies if isinstance(reply, Progress) for t in reply.tokens] == tokens


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_newcomer_gets_what_running_streams_only_hold_ahead(page_size: int) -> None:
    """The pool holds three streams' tokens and no more: two that draft far ahead do not crowd out the third."""
    params = SamplingParams(max_tokens=12, temperature=0.0)
    prompts = {1: PROMPT[1:], 2: PROMPT[2:], 3: PROMPT[::-1]}
    tokens = -(-(len(PROMPT) + params.max_tokens) // page_size)
    of = engine(page_size, num_pages=3 * tokens)
    subject = desk(of, Guess(wrong))
    for request in (1, 2):
        subject.receive(lease(request, prompts[request], params, drafts=10))
    replies = [*subject.step(), *subject.step()]
    assert of.books.allocator.free < tokens, "what they hold ahead leaves no room for the third"
    subject.receive(lease(3, prompts[3], params, drafts=2))
    gone, more = refused(subject)
    assert gone == []
    for request, prompt in prompts.items():
        assert stream([*replies, *more], request) == plain(prompt, params)
