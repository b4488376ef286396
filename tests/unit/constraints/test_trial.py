"""A constraint that cannot be compiled, ever or in time, is found out in bounded time, and harms nobody."""

from __future__ import annotations

import json
import os
import resource
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from distspec.constraints import Compiler
from distspec.constraints.trial import CHILDREN, MAX_WAITING, Trials, main
from distspec.errors import BadConstraint, Overloaded, Unavailable
from distspec.protocol.values import Constraint
from tests.spelling import end_id, tokenizer, vocab_size

GOOD = Constraint(kind="json_object")
BAD = Constraint(kind="regex", text="(")
LONG = Constraint(kind="json_schema", text='{"type":"string","pattern":"^[^\\\\x00-\\\\x1f]{0,5000}$"}')
"""Half a minute on a fast machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(found)
    return found


def _wait_for_fork(child: int) -> None:
    while not Path(f"/proc/{child}/task/{child}/children").read_text():
        time.sleep(0.01)


@pytest.fixture(scope="module")
def trials(folder: Path) -> Iterator[Trials]:
    found = Trials(folder, vocab_size(), [end_id()], limit_s=3.0)
    yield found
    found.close()


def test_what_can_be_compiled_passes(trials: Trials) -> None:
    assert trials.submit(GOOD).result(120) is None


def test_what_cannot_says_why_each_time_it_is_asked(trials: Trials) -> None:
    for _ in range(2):
        with pytest.raises(BadConstraint, match="parenthesis"):
            trials.submit(BAD).result(120)


def test_what_takes_too_long_is_refused_and_others_do_not_wait_for_it(trials: Trials) -> None:
    trials.submit(GOOD).result(120)
    slow = trials.submit(LONG)
    other = trials.submit(Constraint(kind="regex", text="[a-z]+"))
    other.result(120)
    with pytest.raises(BadConstraint, match="within 3 s"):
        slow.result(120)
    trials.submit(Constraint(kind="regex", text="after")).result(120)


def test_what_takes_too_long_costs_no_child(trials: Trials) -> None:
    """Nothing has to be loaded again, so others are tried at once."""
    trials.submit(GOOD).result(120)
    before = set(trials._all)
    with pytest.raises(BadConstraint, match="within 3 s"):
        trials.submit(Constraint(kind=LONG.kind, text=LONG.text.replace("5000", "5001"))).result(120)
    assert all(child.is_alive() for child in before)
    trials.submit(Constraint(kind="regex", text="at once")).result(120)
    assert set(trials._all) >= before


@pytest.mark.parametrize("retry_s", [0.0, 1000.0])
def test_what_took_too_long_is_tried_again_later(folder: Path, retry_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may have been busy."""
    made = Trials(folder, vocab_size(), [end_id()], limit_s=3.0, retry_s=retry_s)
    made.submit(GOOD).result(120)
    with monkeypatch.context() as busy:
        busy.setattr("distspec.constraints.trial._Child.ask", _late)
        with pytest.raises(BadConstraint, match="within 3 s"):
            made.submit(Constraint(kind="regex", text="[a-z]")).result(120)
    if retry_s:
        with pytest.raises(BadConstraint, match="within 3 s"):
            made.submit(Constraint(kind="regex", text="[a-z]")).result(120)
    else:
        made.submit(Constraint(kind="regex", text="[a-z]")).result(120)
    made.close()


def _late(*_: object) -> str | None:
    raise TimeoutError


def test_more_than_can_be_tried_soon_are_refused_and_what_is_known_is_not(folder: Path) -> None:
    made = Trials(folder, vocab_size(), [end_id()], limit_s=3.0)
    made.submit(GOOD).result(120)
    slow = [made.submit(Constraint(kind=LONG.kind, text=LONG.text + " " * i)) for i in range(CHILDREN)]
    many = [made.submit(Constraint(kind="regex", text=f"[a-z]{{{i}}}x")) for i in range(1, MAX_WAITING - CHILDREN + 1)]
    with pytest.raises(Overloaded, match=f"{MAX_WAITING} constraints"):
        made.submit(BAD)
    assert made.submit(GOOD).done()
    for one in many:
        one.result(120)
    assert all(isinstance(one.exception(120), BadConstraint) for one in slow)
    made.submit(Constraint(kind="regex", text="room again")).result(120)
    made.close()


def test_a_child_that_is_started_ahead_is_the_one_that_is_asked(folder: Path) -> None:
    made = Trials(folder, vocab_size(), [end_id()])
    made.start()
    [child] = made._all
    assert made.submit(GOOD).result(120) is None
    assert made._all == {child}
    made.close()


def test_what_is_being_started_holds_up_no_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start takes seconds, a script that only ends does not wait for them."""
    monkeypatch.setattr("distspec.constraints.trial.sys.executable", _sleeper(folder))
    made = Trials(folder, vocab_size(), [end_id()])
    made.start()
    waits = made.submit(GOOD)
    made.close()
    with pytest.raises(Unavailable):
        waits.result(0)


def _sleeper(folder: Path) -> str:
    """A program that says nothing for longer than a test may take."""
    path = folder / "sleeper"
    path.write_text("#!/bin/sh\nexec sleep 10000\n")
    path.chmod(0o755)
    return str(path)


def test_what_json_shares_is_compiled_before_anything_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each trial is a fork, and what only a fork has worked out is gone with it: strings are most of the work."""
    compiled = []
    own = Compiler.compile

    def recorded(self: Compiler, constraint: Constraint) -> object:
        compiled.append((constraint.kind, capsys.readouterr().out))
        return own(self, constraint)

    monkeypatch.setattr(Compiler, "compile", recorded)
    monkeypatch.setattr("sys.argv", ["trial", str(folder), str(vocab_size()), json.dumps([end_id()]), "3.0"])
    monkeypatch.setattr("sys.stdin", [])
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(os, "nice", lambda _: None)
    main()
    assert compiled == [("json_object", "")]
    assert capsys.readouterr().out == "\n"


def test_a_child_that_dies_is_replaced(trials: Trials) -> None:
    trials.submit(GOOD).result(120)
    for child in list(trials._all):
        child._process.kill()
        child._process.wait()
    trials.submit(Constraint(kind="regex", text="another")).result(120)


def test_no_child_outlives_its_trials(folder: Path) -> None:
    made = Trials(folder, vocab_size(), [end_id()])
    made.submit(GOOD).result(120)
    [child] = made._all
    made.close()
    assert child._process.returncode is not None


def test_a_child_ends_with_its_input(folder: Path) -> None:
    made = Trials(folder, vocab_size(), [end_id()])
    made.submit(GOOD).result(120)
    [child] = made._all
    assert child._process.stdin is not None
    child._process.stdin.close()
    assert child._process.wait(60) == 0
    made.close()


def test_without_a_tokenizer_no_child_starts(tmp_path: Path) -> None:
    made = Trials(tmp_path, 10, [0])
    with pytest.raises(Unavailable):
        made.submit(GOOD).result(120)
    made.close()


def test_a_child_whose_parent_is_gone_stops_compiling(folder: Path) -> None:
    """The limit of processor time, which nobody has to watch: not even the child that has forked."""
    made = Trials(folder, vocab_size(), [end_id()], limit_s=1.0)
    made.submit(GOOD).result(120)
    [child] = made._all
    assert child._process.stdin is not None
    child._process.stdin.write(json.dumps([LONG.kind, LONG.text.replace("5000", "9000")]).encode() + b"\n")
    _wait_for_fork(child._process.pid)
    child._process.kill()
    child._process.wait()
    assert child._process.stdout is not None
    ended = select.poll()
    ended.register(child._process.stdout, select.POLLHUP)
    assert ended.poll(60_000), "the fork has this pipe open until it ends"
    made.close()


def test_children_are_heard_in_a_process_with_many_open_files(folder: Path) -> None:
    with ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        made = Trials(folder, vocab_size(), [end_id()])
        stack.callback(made.close)
        assert made.submit(GOOD).result(120) is None
