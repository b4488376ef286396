"""The time that overlapping spans cover."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distspec.coordinator.busy import Busy

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=30)


@given(spans)
def test_every_moment_counts_once_however_many_spans_cover_it(spans: list[tuple[int, int]]) -> None:
    busy = Busy()
    added = [busy.add(*span) for span in sorted(spans, key=lambda span: span[1])]
    assert sum(added) == len({moment for start, end in spans for moment in range(start, end)})
    assert all(seconds >= 0 for seconds in added)


@given(spans)
def test_a_span_never_adds_more_than_itself(spans: list[tuple[int, int]]) -> None:
    """Whatever the order, as when a worker's clock was set back."""
    busy = Busy()
    assert all(0 <= busy.add(start, end) <= end - start for start, end in spans)
