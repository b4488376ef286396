from __future__ import annotations

import pytest
import torch

from distspec.protocol.values import SamplingParams
from distspec.sampling import tables
from distspec.sampling.edits import IN_PROMPT
from distspec.sampling.tables import Biases, Counts

CPU = torch.device("cpu")
ASKS = SamplingParams(max_tokens=9, frequency_penalty=0.5, logit_bias=((3, 1.0), (4, -2.0), (99, 7.0)))


def test_tables_grow_with_slots_and_keep_what_they_hold() -> None:
    counts, biases = Counts(10, CPU), Biases(10, CPU)
    for slot in (0, 1, 5, 2):
        counts.open(slot, ASKS)
        biases.open(slot, ASKS)
        counts.add(*(torch.tensor(counts.places(slot, tokens)) for tokens in ([slot, slot], [slot, 9, 9])))
    biases.open(6, SamplingParams(max_tokens=9, logit_bias=tuple((token, 1.0) for token in range(9))))
    for slot in (0, 1, 5, 2):
        assert counts.seen[slot].nonzero()[:, 0].tolist() == [slot, 9]
        assert counts.seen[slot, [slot, 9]].tolist() == [IN_PROMPT + 1, 2]
        assert counts.penalties[slot].tolist() == [1.0, 0.0, 0.5]
        assert [token for token in biases.tokens[slot].tolist() if token >= 0] == [3, 4]  # 99 is no token here
        assert biases.values[slot, :2].tolist() == [1.0, -2.0]


def test_a_slot_that_is_opened_again_begins_anew() -> None:
    counts, biases = Counts(10, CPU), Biases(10, CPU)
    for params in (ASKS, SamplingParams(max_tokens=9, repetition_penalty=2.0, logit_bias=((1, 5.0),))):
        counts.open(3, params)
        biases.open(3, params)
        assert not counts.seen[3].any()
        counts.add(torch.tensor(counts.places(3, [1])), torch.tensor(counts.places(3, [2, 12])))
    assert counts.penalties[3].tolist() == [2.0, 0.0, 0.0]
    assert biases.tokens[3].tolist() == [1, -1]


def test_nothing_is_held_before_somebody_asks() -> None:
    assert Counts(10**6, CPU).seen.numel() == 0
    assert Biases(10**6, CPU).tokens.numel() == 0


def test_where_there_is_no_memory_for_the_second_table_the_first_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read one by the width of the other."""
    counts, biases = Counts(10, CPU), Biases(10, CPU)
    room, calls = tables._room, list[int]()

    def full(table: torch.Tensor, rows: int, columns: int, fill: int = 0) -> torch.Tensor:
        calls.append(rows)
        if len(calls) % 2 == 0:
            raise torch.OutOfMemoryError
        return room(table, rows, columns, fill)

    monkeypatch.setattr(tables, "_room", full)
    for table in (counts, biases):
        with pytest.raises(torch.OutOfMemoryError):
            table.open(0, ASKS)
    assert len(calls) == 4
    assert biases.tokens.shape == biases.values.shape
    assert len(counts.penalties) == len(counts.seen)
