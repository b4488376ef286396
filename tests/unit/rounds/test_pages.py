"""Pages of leased rounds: how much is held ahead of them, and that every page has its holders after every round."""

from __future__ import annotations

from collections.abc import Iterable
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


def conserves(of: Engine, slots: Iterable[int]) -> bool:
    """free + cached + held = total, where each page counts once."""
    of.check()
    cached = set(of.books.cache.pages) if of.books.cache is not None else set()
    held = {page for slot in slots for page in of.sequence(slot).pages}
    return of.books.allocator.free + len(cached | held) == of.books.allocator.num_pages


class Book:
    """What a request's pages must be after each round, said a second time and from the replies alone."""

    def __init__(self, message: Lease, page_size: int) -> None:
        assert message.params is not None
        self.size, self.max_tokens = page_size, message.params.max_tokens
        self.prompt, self.emitted = len(message.tokens), 0
        self.nodes = max(message.shape.steps * message.shape.topk, message.nodes) if message.shape else 0

    def limit(self) -> int:
        """Positions that two rounds from here need. The last token so far is not computed yet."""
        left = self.max_tokens - self.emitted
        return self.prompt + self.emitted - 1 + min(2, left) * (1 + (self.nodes if left > 1 else 0))

    def pages(self, progress: Progress) -> int:
        """What was reserved when the round began, as far as it is still needed."""
        began, computed = self.limit(), self.prompt + self.emitted + progress.accepted[0]
        self.emitted += len(progress.tokens)
        needed = computed if progress.ended else self.limit()
        return -(-min(began, needed) // self.size)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("local", ["bushy", "same model"])
def test_pages_after_every_round(page_size: int, topk: int, local: str) -> None:
    """Requests that end by length, by a stop token in an accepted run, at the model's last position, and by abort."""
    of = engine(page_size)
    drafter = (
        Guess(bushy)
        if local == "bushy"
        else StandaloneDrafter(
            engine(page_size), max_num_batched_tokens=64, max_scratch_nodes=64, max_model_len=SHAPE.max_position
        )
    )
    subject = desk(of, drafter, budget=512)
    shape = Shape(steps=STEPS, topk=topk, width=topk)
    stop = next(token for token in plain(PROMPT, SEEDED)[6:] if token not in plain(PROMPT, SEEDED)[:6])
    long = PROMPT * (SHAPE.max_position // len(PROMPT) - 1)
    messages = [
        lease(1, PROMPT, GREEDY, shape=shape, nodes=5),
        lease(2, PROMPT, replace(SEEDED, stop_token_ids=(stop,)), shape=shape, nodes=9),
        lease(
            3,
            long,
            replace(SEEDED, max_tokens=SHAPE.max_position - len(long) + 1),
            shape=shape,
            nodes=5,
        ),
        lease(4, PROMPT[3:], SEEDED, shape=shape, nodes=5),
        lease(5, PROMPT[3:], SEEDED),
        lease(6, PROMPT[2:], GREEDY, drafts=1),
    ]
    books = {message.request: Book(message, page_size) for message in messages}
    random = Random(page_size * topk)
    replies: list[Progress] = []
    for message in messages:
        assert subject.receive(message) == []
    slots = {message.request: message.request - 1 for message in messages}
    while subject.ready():
        for reply in subject.step():
            assert isinstance(reply, Progress)
            replies.append(reply)
            assert len(of.sequence(slots[reply.request]).pages) == books[reply.request].pages(reply)
        assert conserves(of, slots.values())
        if random.random() < 0.2 and 4 in slots:
            assert subject.receive(Drop(request=4, epoch=1)) == [Freed(request=4, epoch=1)]
            del slots[4]
            assert conserves(of, slots.values())
    ends = [reply for reply in replies if reply.ended and reply.accepted[0]]
    assert {reply.request for reply in ends} >= {2, 3}, "streams end in the middle of what was accepted"
    for message in messages:
        if message.request in slots:
            assert message.params is not None
            assert stream(replies, message.request) == plain(message.tokens, message.params)
            assert subject.receive(Drop(request=message.request, epoch=1)) == [Freed(request=message.request, epoch=1)]
    assert conserves(of, ())


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
