"""How `distspec serve` ends: by the first signal, once, wherever that finds it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from distspec.cli.serve import _Interruption

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_block_and_is_said(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    with _Interruption():
        signal.raise_signal(number)
        pytest.fail("went on")
    assert capsys.readouterr().err == "stopping ...\n"


def test_later_signals_do_not_disturb_what_cleans_up(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = False
    with _Interruption():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            for number in SIGNALS:
                signal.raise_signal(number)
            cleaned = True
    assert cleaned
    assert capsys.readouterr().err == "stopping ...\n"


def test_a_signal_waits_for_what_must_not_be_torn_off(capsys: pytest.CaptureFixture[str]) -> None:
    whole = False
    with _Interruption() as interruption:
        with interruption.held_back():
            signal.raise_signal(signal.SIGINT)
            whole = capsys.readouterr().err == "stopping ...\n"
        pytest.fail("went on")
    assert whole


def test_a_second_signal_does_not_wait() -> None:
    with _Interruption() as interruption, interruption.held_back():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")


def test_without_a_signal_all_goes_on() -> None:
    with _Interruption() as interruption:
        with interruption.held_back():
            pass
        with pytest.raises(ValueError, match="of its own"):
            raise ValueError("of its own")


def test_errors_of_the_block_are_raised() -> None:
    with pytest.raises(ValueError, match="of its own"), _Interruption():
        raise ValueError("of its own")
