"""How a product of a few rows is cut up among programs.

Knows sizes of matrices and what was fastest on an H200. Does not know kernels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """rows, outputs, inputs: of one step of a program, powers of two, rows padded to them; at least 16 rows go through
    the matrix units. split: parts of a program that share the inputs, each taking `inputs` of them in a step. stages:
    steps in flight. warps: of a program."""

    rows: int
    outputs: int
    inputs: int
    split: int
    stages: int
    warps: int


def tile(rows: int, outputs: int, inputs: int, gated: bool) -> Tile | None:
    """What to use for x [rows, inputs] times a matrix with so many outputs; gated: with as many gates on top."""
    if rows == 1:
        return Tile(1, 4, 1024, 1, 3, 4)
    return Tile(16, 32, 128, 1, 4, 4)
