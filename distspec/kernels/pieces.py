"""What passes over a vocabulary have in common: what a block weighs, and the best tokens by way of the best pieces.

Knows scores of a block of tokens, float32, -inf past the end. Does not know what they are scores of. Of the best `most`
tokens of a row, several may come from one piece, but no more pieces than these hold any.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weighed(score):
    """The best of some scores, and the sum of all their exponentials beside it; 0 where nothing stays."""
    top = tl.max(score, 0)
    return top, tl.sum(tl.exp(score - tl.where(top == float("-inf"), 0.0, top)), 0)


@triton.jit
def in_best_pieces(bests, row, pieces, most, PIECES: tl.constexpr, PIECE: tl.constexpr, COUNT: tl.constexpr):
    """int32 [COUNT * PIECE]: the tokens of the best `most` pieces of a row, the rest lie past the end. bests: float32
    [rows, pieces], the best score of each; PIECES, COUNT: at least `pieces` and `most`, powers of two."""
    piece, place = tl.arange(0, PIECES), tl.arange(0, COUNT)
    best = tl.load(bests + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    chosen = tl.full([COUNT], 0, tl.int32) + pieces
    for i in range(most):
        highest, where = tl.max(best, 0, return_indices=True)
        # Where no piece is left, one past the last is chosen: another one twice would be its tokens twice.
        chosen = tl.where(place == i, tl.where(highest > float("-inf"), where, pieces), chosen)
        best = tl.where(piece == where, float("-inf"), best)
    return tl.reshape(chosen[:, None] * PIECE + tl.arange(0, PIECE)[None, :], [COUNT * PIECE])
