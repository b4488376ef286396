"""Credits, limits and the choice of a worker."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.coordinator.admission import MOST_LOGPROBS, Credits, Limits
from distspec.errors import IllegalTransition, InvalidField
from distspec.protocol.channel.pump import MAX_FRAME_BYTES
from distspec.protocol.codec import pack_logprobs
from distspec.protocol.messages import Hello
from distspec.protocol.values import TokenLogprobs
from tests.machines import params


def credits(**workers: dict[str, Any]) -> Credits:
    out = Credits()
    for name, facts in workers.items():
        whole = {"role": "decode", "slots": 2, "capacity": 400, "page_size": 4, "max_model_len": 100, "vocab_size": 50}
        out.join(Hello(worker=name, incarnation=1, fingerprint={}, **{**whole, **facts}))
    return out


@given(st.lists(st.sampled_from(["take", "close", "give back"]), max_size=30))
def test_no_more_is_out_than_was_granted_and_none_comes_back_twice(acts: list[str]) -> None:
    """A credit is out from the opening to the Freed, however long ago its room was given up."""
    books, out = credits(w={"slots": 3}), 0
    for number, act in enumerate(acts):
        if act == "take" and books.choose(["w"], (1,)):
            books.take("w", number, 1)
            out += 1
        elif act == "close":
            books.close("w", number - 1)
        elif act == "give back" and out:
            books.give_back("w")
            out -= 1
        assert books.workers["w"].out == out <= 3
        assert (books.choose(["w"], (1,)) is None) == (out == 3)


def test_a_credit_that_nobody_took_cannot_come_back() -> None:
    books = credits(w={})
    with pytest.raises(IllegalTransition, match="nobody took"):
        books.give_back("w")
    assert books.workers["w"].out == 0


def test_room_is_what_open_requests_leave_and_one_alone_always_fits() -> None:
    books = credits(w={"capacity": 40})
    assert books.choose(["w"], (1,) * 1000) == "w"
    books.take("w", 1, 10)  # and two pages of 4 beside it
    assert books.choose(["w"], (1,) * 14) == "w"
    assert books.choose(["w"], (1,) * 15) is None
    books.grow("w", 1, 11)
    assert books.choose(["w"], (1,) * 14) is None
    books.close("w", 1)
    assert books.choose(["w"], (1,) * 15) == "w"


def test_the_worker_with_the_prefix_is_chosen_until_it_is_much_busier() -> None:
    books = credits(a={"slots": 9}, b={"slots": 9})
    prompt = tuple(range(50)) * 3
    books.prefixes.note("b", prompt)
    assert books.choose(["a", "b"], prompt) == "b"
    books.take("b", 1, 1)
    assert books.choose(["a", "b"], prompt) == "b"
    books.take("b", 2, 1)
    assert books.choose(["a", "b"], prompt) == "a"
    assert books.least_loaded(["a", "b"], 1) == "a"


def test_a_draining_worker_counts_as_absent() -> None:
    books = credits(a={}, b={})
    books.workers["a"].draining = True
    assert books.role("decode") == ["b"]
    assert books.choose(["a"], (1,)) is None


def test_a_worker_that_joins_again_has_a_clean_slate() -> None:
    books = credits(a={"slots": 1})
    books.take("a", 1, 1)
    books.prefixes.note("a", tuple(range(64)))
    books.join(books.workers["a"].hello)
    assert books.choose(["a"], (1,)) == "a"
    assert books.prefixes.matched("a", tuple(range(64))) == 0


def test_limits_are_those_of_the_smallest_target_worker() -> None:
    """With capacity for max_model_len, scratch nodes and two partly filled pages, max_model_len is the limit."""
    books = credits(a={}, b={"role": "verify", "max_model_len": 90, "vocab_size": 40}, d={"role": "draft", "slots": 1})
    assert books.limits(8) == Limits(vocab_size=40, longest=90)
    assert credits(a={"capacity": 60}).limits(8) == Limits(vocab_size=50, longest=60 - 8 - 8)
    assert credits(d={"role": "draft"}).limits(8) is None


@given(st.integers(1, 120), st.integers(1, 120))
def test_a_request_that_fits_never_grows_past_the_limit(prompt: int, most: int) -> None:
    limits = Limits(vocab_size=50, longest=100)
    if prompt >= 100:
        with pytest.raises(InvalidField, match="at most 99"):
            limits.fit((1,) * prompt, params(max_tokens=most))
    else:
        tokens = limits.fit((1,) * prompt, params(max_tokens=most)).max_tokens
        assert tokens == min(most, 100 - prompt)


@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidField, match="ids 0 to 49"):
        Limits(vocab_size=50, longest=100).fit((1, token), params())


def test_logprobs_of_a_prompt_fit_a_frame() -> None:
    limits, prompt = Limits(vocab_size=50, longest=10**6), (1,) * (MOST_LOGPROBS // 10)
    assert limits.fit(prompt, params(prompt_logprobs=9)).prompt_logprobs == 9
    with pytest.raises(InvalidField) as caught:
        limits.fit(prompt, params(prompt_logprobs=10))
    assert caught.value.field == "prompt_logprobs"
    assert limits.fit(prompt, params()).prompt_logprobs is None
    widest = TokenLogprobs(logprob=-1.5, rank=2**31, top=((2**31, -1.5),) * 20)
    assert len(pack_logprobs([widest] * 100)) * MOST_LOGPROBS / 2100 < MAX_FRAME_BYTES / 2
