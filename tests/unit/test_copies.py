"""What arrives is what was sent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distspec.copies import integers, numbers, put, to_device, to_host

CPU = torch.device("cpu")
values_ = st.lists(st.integers(-(2**31), 2**31 - 1))


@given(values_, st.sampled_from([torch.int32, torch.int64]))
def test_integers_keep_their_values(values: list[int], dtype: torch.dtype) -> None:
    for given_ in (values, tuple(values)):
        found = integers(given_, CPU, dtype)
        assert found.dtype == dtype
        assert to_host(found).tolist() == values
    place = torch.full((len(values) + 2,), 7, dtype=dtype)
    put(values, place[: len(values)])
    assert place.tolist() == [*values, 7, 7]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.floats(width=32, allow_nan=False)))
def test_numbers_of_two_kinds_keep_their_values(whole: list[int], real: list[float]) -> None:
    found = numbers(whole, real, CPU)
    assert [each.dtype for each in found] == [torch.int64, torch.float32]
    assert [each.tolist() for each in found] == [whole, real]


def test_values_that_do_not_fit_are_refused() -> None:
    for value, dtype in ((2**31, torch.int32), (2**63, torch.int64), (-(2**63) - 1, torch.int64)):
        with pytest.raises(OverflowError):
            integers([value], CPU, dtype)


def test_a_place_is_filled_as_a_whole() -> None:
    with pytest.raises(RuntimeError):
        put([1, 2, 3], torch.zeros(2, dtype=torch.int64))


def test_nothing_moves_on_a_cpu() -> None:
    values = torch.arange(3)
    assert to_device(values, CPU) is values
