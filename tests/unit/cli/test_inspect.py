"""What `trace` writes of the spans that a fleet gave it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distspec.cli.inspect import _write_trace
from distspec.errors import DistspecError
from distspec.trace import Span

SPANS = [
    Span("queue", 1.0, 1.1, "coordinator", 4, {"key": "a"}),
    Span("prefill", 1.1, 1.2, "prefill:0", 4, task=1, brought=1, kept=1),
    Span("queue", 1.0, 1.2, "coordinator", 5, {"key": "b"}),
    Span("prefill", 1.2, 1.3, "prefill:0", 5, task=2, brought=1, kept=1),
    Span("decode", 1.3, 1.4, "decode:0", 5, task=3, brought=1, kept=1),
]


def requests(path: Path) -> set[int]:
    return {event["args"]["request"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"}


def test_a_json_file_shows_all_requests_or_the_one_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "life.json"
    assert _write_trace(SPANS, None, path) == f"5 spans -> {path}"
    assert requests(path) == {4, 5}
    assert _write_trace(SPANS, 4, path) == f"2 spans of request 4 -> {path}"
    assert requests(path) == {4}


def test_a_picture_shows_the_newest_request_or_the_one_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "life.png"
    assert _write_trace(SPANS, None, path) == f"3 spans of request 5 -> {path}"
    newest = path.read_bytes()
    assert newest.startswith(b"\x89PNG")
    assert _write_trace(SPANS, 4, path) == f"2 spans of request 4 -> {path}"
    assert path.read_bytes() != newest


@pytest.mark.parametrize(
    ("spans", "request_number", "suffix", "says"),
    [
        (SPANS, 9, ".png", "of request 9; requests that are: 4 to 5"),
        (SPANS, 9, ".json", "of request 9; requests that are: 4 to 5"),
        ([], None, ".png", "requests that are: none"),
    ],
)
def test_a_request_without_spans_is_an_error_and_no_file(
    spans: list[Span], request_number: int | None, suffix: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / f"life{suffix}"
    with pytest.raises(DistspecError, match=says):
        _write_trace(spans, request_number, path)
    assert not path.exists()
