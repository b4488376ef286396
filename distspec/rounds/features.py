"""What drafters are told of the target's hidden states, beside the engine or away from it.

Knows where a text lies in the engine's sequences. Does not know drafters, or what they make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distspec.engine import Engine
from distspec.errors import TransferFailed
from distspec.protocol.messages import SendFeatures


def features(engine: Engine, slot: int, tokens: range, below: Sequence[int]) -> Tensor:
    """For each of these tokens of a text, by position, the features of the position before it: [len(tokens), F].

    below: tokens of the text that the slot's sequence, which may have more than the text, has not committed. Such of
    them as were judged here lie in its nodes. Zeros before the first token of a text, and for positions that only other
    workers have computed.
    """
    sequence = engine.sequence(slot)
    wanted = range(max(0, tokens.start - 1), tokens.stop - 1)
    indices = [*range(sequence.length), *sequence.spell(below[:-1])][wanted.start : wanted.stop]
    found = engine.features(slot, indices)
    out = torch.zeros(len(tokens), found.shape[1], dtype=found.dtype, device=found.device)
    first = wanted.start + 1 - tokens.start
    out[first : first + len(indices)] = found
    return out


def reader(engine: Engine, slot: int, message: SendFeatures) -> Callable[[range], Tensor]:
    """Reads the features of some of the message's positions, [positions, F].

    Those of nodes are copied now, since these move when they are committed; those of committed positions, a whole
    prompt maybe, lie still as long as the slot is open. Raises TransferFailed if not all are here.
    """
    sequence = engine.sequence(slot)
    stop = message.start + message.length
    middle = min(max(message.start, sequence.length), stop)
    nodes = message.nodes[len(message.nodes) - (stop - middle) :] if stop - middle <= len(message.nodes) else ()
    if len(nodes) < stop - middle or not set(nodes) <= set(sequence.nodes):
        raise TransferFailed(f"{sequence.length} of {stop} positions are here, no nodes {list(nodes)}")
    copies = engine.features(slot, [sequence.ancestors(node)[0] for node in nodes])

    def read(positions: range) -> Tensor:
        committed = engine.features(slot, range(positions.start, min(positions.stop, middle)))
        others = copies[max(0, positions.start - middle) : max(0, positions.stop - middle)]
        return torch.cat((committed, others))

    return read
