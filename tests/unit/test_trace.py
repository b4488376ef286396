"""The trace keeps the last spans and writes what Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distspec.trace import Span, Trace, chrome, write

times = st.integers(0, 50).map(float)
spans = st.lists(
    st.builds(
        lambda name, start, length, track: Span(name, start, start + length, track),
        st.sampled_from(["draft", "verify"]),
        times,
        times,
        st.sampled_from(["draft:0", "verify:0"]),
    ),
    max_size=30,
)


def test_the_buffer_is_bounded_and_counts_what_it_lost() -> None:
    trace = Trace(limit=3)
    for i in range(5):
        trace.add(Span(str(i), i, i + 1, "a"))
    assert [span.name for span in trace.spans()] == ["2", "3", "4"]
    assert trace.dropped == 2


@given(spans)
def test_every_span_is_written_and_none_overlaps_another_of_its_thread(spans: list[Span]) -> None:
    events = chrome(spans)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    drawn = [event for event in events if event["ph"] == "X"]
    assert sorted((e["name"], e["ts"], e["dur"], names[e["tid"]].split(" ")[0]) for e in drawn) == sorted(
        (s.name, s.start_s * 1e6, (s.end_s - s.start_s) * 1e6, s.track) for s in spans
    )
    for thread in names:
        ends = 0.0
        for event in sorted((e for e in drawn if e["tid"] == thread), key=lambda e: (e["ts"], e["dur"])):
            assert event["ts"] >= ends
            ends = event["ts"] + event["dur"]


def test_the_file_is_json_with_request_and_arguments(tmp_path: Path) -> None:
    write([Span("verify", 1.0, 1.5, "verify:0", 7, {"rows": 3})], tmp_path / "t.json")
    event = json.loads((tmp_path / "t.json").read_text())["traceEvents"][0]
    assert event["args"] == {"request": 7, "rows": 3}
    assert (event["ts"], event["dur"]) == (1e6, 0.5e6)


def test_what_was_wasted_has_another_name_and_colour_than_what_was_kept() -> None:
    """Perfetto colours by name."""
    whole = Span("verify", 0.0, 1.0, "verify:0", 7, task=3, brought=4, kept=4)
    looks = {}
    for kept in range(5):
        span = replace(whole, kept=kept)
        event = chrome([span])["traceEvents"][0]
        looks[kept] = event["name"], event["cname"]
        assert event["args"] == {"request": 7, "task": 3, "brought": 4, "kept": kept}
        assert span.use == kept / 4
    assert looks[4][0] == "verify"
    assert looks[0] != looks[1] == looks[2] == looks[3] != looks[4] != looks[0]


def test_work_that_is_to_bring_no_tokens_is_never_wasted_and_work_that_brought_none_is() -> None:
    assert Span("transfer", 0.0, 1.0, "verify:0").use == 1
    assert Span("draft", 0.0, 1.0, "draft:0", brought=0).use == 0
