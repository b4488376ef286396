"""Where stop strings end an answer, by the book."""

from __future__ import annotations

from collections.abc import Sequence


def reference_end(pieces: Sequence[str], stops: Sequence[str], least: int, include: bool) -> tuple[str, int, bool]:
    """Text and tokens up to the first stop that a token after the first `least` completes. pieces: of each token."""
    whole = ""
    for count, piece in enumerate(pieces, 1):
        for char in piece:
            whole += char
            ending = [stop for stop in stops if whole.endswith(stop)]
            if ending and count > least:
                return (whole if include else whole[: -max(map(len, ending))]), count, True
    return whole, len(pieces), False
