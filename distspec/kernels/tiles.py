"""How a product of a few rows is cut up among programs.

Knows sizes of matrices and what was fastest for them on an H200 in bfloat16. Does not know kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tile:
    """rows, outputs, inputs: of one step of a program, powers of two, rows padded to them; at least 16 rows go through
    the matrix units. split: parts of a program that share the inputs, each taking `inputs` of them in a step. stages:
    steps in flight. warps: of a program. apart: programs that share the inputs, whose sums another kernel adds up."""

    rows: int
    outputs: int
    inputs: int
    split: int
    stages: int
    warps: int
    apart: int = 1


ROWS = (1, 16, 32, 64)
"""Tiles are for up to so many; above, cuBLAS is as fast. Rows that pad a box are not free: 24 rows in a box of 64 took
up to half as long again as in one of 32, and of 128 only full boxes were worth it."""

_Fields = tuple[int, ...]

_MEASURED: dict[tuple[int, int, bool], tuple[_Fields, ...]] = {
    # qwen3-0.6b qkv
    (4096, 1024, False): (
        (1, 2, 1024, 1, 1, 1),
        (16, 16, 128, 2, 4, 2),
        (32, 64, 128, 1, 6, 4),
        (64, 64, 128, 1, 6, 4),
    ),
    # qwen3-0.6b output
    (1024, 2048, False): (
        (1, 1, 512, 1, 1, 1),
        (16, 8, 128, 4, 4, 4),
        (32, 64, 128, 1, 4, 4, 3),
        (64, 64, 128, 1, 4, 4, 4),
    ),
    # qwen3-0.6b gate_up
    (3072, 1024, True): (
        (1, 1, 1024, 1, 1, 1),
        (16, 64, 128, 1, 6, 4),
        (32, 64, 128, 1, 4, 4),
        (64, 64, 128, 1, 4, 4),
    ),
    # qwen3-0.6b down
    (1024, 3072, False): (
        (1, 2, 512, 1, 4, 1),
        (16, 8, 128, 4, 4, 4),
        (32, 64, 128, 1, 6, 4, 3),
        (64, 64, 128, 1, 6, 4, 4),
    ),
    # qwen3-0.6b head
    (151936, 1024, False): (
        (1, 4, 1024, 1, 1, 4),
        (16, 64, 128, 1, 3, 4),
        (32, 64, 128, 1, 3, 4),
        (64, 128, 128, 1, 4, 4),
    ),
    # llama-1b qkv
    (3072, 2048, False): (
        (1, 2, 2048, 1, 1, 4),
        (16, 8, 64, 4, 4, 4),
        (32, 64, 128, 1, 6, 4),
        (64, 64, 128, 1, 6, 4),
    ),
    # llama-1b output
    (2048, 2048, False): (
        (1, 1, 512, 1, 1, 1),
        (16, 16, 128, 4, 4, 4),
        (32, 64, 128, 1, 4, 4, 4),
        (64, 64, 128, 1, 4, 4, 4),
    ),
    # llama-1b gate_up
    (8192, 2048, True): (
        (1, 2, 2048, 1, 1, 8),
        (16, 64, 128, 1, 4, 4),
        (32, 64, 128, 1, 4, 4),
        (64, 64, 128, 1, 4, 4),
    ),
    # llama-1b down
    (2048, 8192, False): (
        (1, 4, 2048, 1, 1, 4),
        (16, 16, 128, 4, 4, 4),
        (32, 64, 128, 1, 6, 4, 3),
        (64, 64, 128, 1, 4, 4, 4),
    ),
    # llama-1b head
    (128256, 2048, False): (
        (1, 1, 2048, 1, 1, 4),
        (16, 128, 128, 1, 3, 4),
        (32, 64, 128, 1, 3, 4),
        (64, 128, 128, 1, 4, 4),
    ),
    # llama-8b qkv
    (6144, 4096, False): (
        (1, 4, 2048, 1, 1, 8),
        (16, 64, 128, 1, 6, 4),
        (32, 64, 128, 1, 6, 4),
        (64, 128, 128, 1, 4, 4),
    ),
    # llama-8b output
    (4096, 4096, False): (
        (1, 1, 4096, 1, 1, 4),
        (16, 16, 64, 4, 4, 4),
        (32, 64, 128, 1, 6, 4),
        (64, 128, 64, 1, 6, 4, 3),
    ),
    # llama-8b gate_up
    (14336, 4096, True): (
        (1, 4, 1024, 1, 1, 4),
        (16, 64, 128, 1, 3, 4),
        (32, 128, 128, 1, 3, 4),
        (64, 128, 64, 1, 4, 4),
    ),
    # llama-8b down
    (4096, 14336, False): (
        (1, 2, 2048, 1, 1, 4),
        (16, 16, 64, 4, 4, 4),
        (32, 64, 128, 1, 4, 4, 3),
        (64, 128, 64, 1, 6, 4, 3),
    ),
    # llama-8b head
    (128256, 4096, False): (
        (1, 1, 2048, 1, 1, 4),
        (16, 128, 128, 1, 3, 4),
        (32, 64, 128, 1, 4, 4),
        (64, 128, 64, 1, 4, 4),
    ),
    # qwen3-32b qkv
    (10240, 5120, False): (
        (1, 8, 1024, 1, 1, 4),
        (16, 64, 128, 1, 4, 4),
        (32, 128, 128, 1, 4, 4),
        (64, 128, 128, 1, 4, 4),
    ),
    # qwen3-32b output
    (5120, 8192, False): (
        (1, 2, 4096, 1, 1, 8),
        (16, 64, 128, 1, 6, 4),
        (32, 64, 128, 1, 6, 4),
        (64, 128, 64, 1, 6, 4, 3),
    ),
    # qwen3-32b gate_up
    (25600, 5120, True): (
        (1, 4, 1024, 1, 4, 4),
        (16, 64, 128, 1, 3, 4),
        (32, 128, 128, 1, 3, 4),
        (64, 64, 128, 1, 4, 4),
    ),
    # qwen3-32b down
    (5120, 25600, False): (
        (1, 4, 1024, 1, 4, 8),
        (16, 64, 128, 1, 4, 4, 3),
        (32, 64, 128, 1, 4, 4, 3),
        (64, 128, 64, 1, 6, 4, 3),
    ),
    # qwen3-32b head
    (151936, 5120, False): (
        (1, 2, 1024, 1, 1, 4),
        (16, 128, 128, 1, 3, 4),
        (32, 64, 128, 1, 3, 4),
        (64, 128, 128, 1, 4, 4),
    ),
}
"""(outputs, inputs, gated): the best for each of ROWS."""

_WIDE = 6144
"""Outputs of a matrix that gives every multiprocessor a tile."""

_ALIGNED = 8
"""Numbers, of two bytes: where the rows of a box may begin."""


def tile(rows: int, outputs: int, inputs: int, gated: bool, room_bytes: int) -> Tile | None:
    """What to use for x [rows, inputs] times a matrix with so many outputs, and as many gates on top if `gated`; None
    where cuBLAS has to do it. room_bytes: shared memory that a program may have."""
    place = bisect_left(ROWS, rows)
    if place == len(ROWS) or (place and inputs % _ALIGNED):
        return None
    found = _MEASURED.get((outputs, inputs, gated))
    measured = [Tile(*found[place])] if found else []
    guess = _guess(place, outputs, inputs, gated)
    smaller = [replace(guess, stages=stages) for stages in range(guess.stages, 1, -1)] or [guess]
    return next((each for each in (*measured, *smaller) if _staged_bytes(each, gated) <= room_bytes), None)


def _staged_bytes(shape: Tile, gated: bool) -> int:
    """Shared memory for the steps in flight, of operands of two bytes; one row is multiplied from registers."""
    if shape.rows == 1:
        return 0
    step = (shape.outputs * (2 if gated else 1) + shape.rows) * shape.inputs * shape.split
    return 2 * step * shape.stages


def _guess(place: int, outputs: int, inputs: int, gated: bool) -> Tile:
    """What is near the best for the measured ones."""
    rows = ROWS[place]
    if rows == 1:
        return Tile(1, 2 if gated else 4, 1024 if gated or inputs <= 1024 else 2048, 1, 1, 4)
    if gated or outputs >= _WIDE:
        return Tile(rows, 64, 128, 1, 3, 4)
    if rows == 16:
        return Tile(rows, 16, 128, 4, 2, 4)
    return Tile(rows, 64, 128, 1, 4, 4, apart=max(1, min(4, 2 * _WIDE // outputs)))
