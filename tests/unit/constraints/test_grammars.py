"""Grammars are compiled once, beside whoever asks, and whoever asks is woken."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from distspec.constraints import Compiler, Grammars, Guide
from distspec.constraints.grammars import KEPT
from distspec.errors import BadConstraint
from distspec.protocol.values import Constraint, SamplingParams
from tests.spelling import end_id, tokenizer, vocab_size

DIGITS, BROKEN = Constraint(kind="regex", text="[0-9]+"), Constraint(kind="regex", text="(")


class Slow:
    """Makes a compiler when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.loads = 0

    def __call__(self) -> Compiler:
        assert self.go.wait(60)
        self.loads += 1
        return Compiler(tokenizer(), vocab_size(), [end_id()])


def test_whoever_asks_does_not_wait_and_is_woken() -> None:
    load, woken = Slow(), threading.Event()
    grammars = Grammars(load, woken.set)
    guide = Guide.of(SamplingParams(max_tokens=1, constraint=DIGITS), grammars)
    assert guide is not None
    assert not guide.is_ready()
    load.go.set()
    assert woken.wait(60)
    assert guide.is_ready()


def test_a_grammar_is_compiled_once_and_so_is_one_that_fails() -> None:
    load = Slow()
    load.go.set()
    grammars = Grammars(load)
    assert grammars.find(DIGITS).result() is grammars.find(Constraint(kind="regex", text="[0-9]+")).result()
    assert grammars.find(BROKEN) is grammars.find(BROKEN)
    assert load.loads == 1


def test_one_that_cannot_be_compiled_says_so_to_everybody() -> None:
    load = Slow()
    load.go.set()
    grammars = Grammars(load)
    params = SamplingParams(max_tokens=1, constraint=BROKEN)
    grammars.find(BROKEN).exception()
    for _ in range(2):
        guide = Guide.of(params, grammars)
        assert guide is not None
        with pytest.raises(BadConstraint, match="parenthesis"):
            guide.is_ready()


def test_a_worker_without_a_tokenizer_says_so() -> None:
    guide = Guide.of(SamplingParams(max_tokens=1, constraint=DIGITS), None)
    assert guide is not None
    with pytest.raises(BadConstraint, match="tokenizer"):
        guide.is_ready()


def test_without_a_constraint_nothing_is_compiled() -> None:
    assert Guide.of(SamplingParams(max_tokens=1), Grammars(Slow())) is None


def test_grammars_that_nobody_asks_for_are_forgotten() -> None:
    load = Slow()
    load.go.set()
    with ThreadPoolExecutor(1) as executor:
        grammars = Grammars(load, executor=executor)
        first = grammars.find(DIGITS)
        second = grammars.find(Constraint(kind="regex", text="second"))
        for i in range(KEPT - 1):
            grammars.find(DIGITS)
            grammars.find(Constraint(kind="regex", text=f"{i}"))
        assert grammars.find(DIGITS) is first
        assert grammars.find(Constraint(kind="regex", text="second")) is not second


def test_large_grammars_are_forgotten_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Slow()
    load.go.set()
    grammars = Grammars(load)
    first = grammars.find(DIGITS)
    second = grammars.find(Constraint(kind="regex", text="second"))
    sizes = [found.result().memory_size_bytes for found in (first, second)]
    monkeypatch.setattr("distspec.constraints.grammars.KEPT_BYTES", sum(sizes) - 1)
    grammars.find(Constraint(kind="regex", text="third")).result()
    assert grammars.find(Constraint(kind="regex", text="second")) is second
    assert grammars.find(DIGITS) is not first
