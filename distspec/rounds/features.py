"""What a drafter beside the engine is told of the target's hidden states.

Knows where a text lies in the engine's sequences. Does not know drafters, or what they make of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distspec.engine import Engine


def features(engine: Engine, slot: int, start: int, below: Sequence[int]) -> Tensor:
    """For each token of a text from position `start` on, the features of the position before it: [tokens, F].

    below: tokens of the text that the slot's sequence has not committed. Such of them as were judged here lie in its
    nodes. Zeros before the first token of a text, and for positions that only other workers have computed.
    """
    sequence = engine.sequence(slot)
    stop = sequence.length + len(below)
    wanted = range(max(0, start - 1), stop - 1)
    indices = [*range(sequence.length), *sequence.spell(below[:-1])][wanted.start : wanted.stop]
    found = engine.features(slot, indices)
    out = torch.zeros(stop - start, found.shape[1], dtype=found.dtype, device=found.device)
    first = wanted.start + 1 - start
    out[first : first + len(indices)] = found
    return out
