"""How `distspec serve` ends: by the first signal, once."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from distspec.cli.serve import _until_interrupted

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_block_and_is_said(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    with _until_interrupted():
        signal.raise_signal(number)
        pytest.fail("went on")
    assert capsys.readouterr().err.startswith("stopping; a second Ctrl-C ")


def test_a_second_signal_ends_what_cleaning_up_waits_for_and_later_ones_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cleaned = False
    with _until_interrupted():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            for number in SIGNALS:
                signal.raise_signal(number)
            cleaned = True
    assert cleaned
    assert capsys.readouterr().err.endswith("\nstopping at once ...\n")
