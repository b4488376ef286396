"""Rows say the same on screen and in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distspec.bench.report import machine, report, row


def test_the_file_and_the_table_hold_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("a/b1", 3.0, "tokens/s", 2.0, {"threads": 2}), row("a/b8", 1.0, "ms", 4.0, {})]
    report(rows, tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [set(one) for one in written] == [{"name", "value", "unit", "reference", "ratio", "context"}] * 2
    assert [(one["name"], one["ratio"], one["context"]) for one in written] == [
        ("a/b1", 1.5, {"threads": 2}),
        ("a/b8", 0.25, {}),
    ]
    lines = capsys.readouterr().out.splitlines()
    for one in written:
        [line] = [line for line in lines if one["name"] in line]
        cells = [cell.strip() for cell in line.strip("│ \n").split("│")]
        assert cells == [one["name"], *(f"{one[key]:g}" for key in ("value", "reference")), cells[3], one["unit"]]
        assert float(cells[3]) == one["ratio"]


def test_a_context_names_the_processor_and_the_versions() -> None:
    context = machine("torch")
    assert context["processor"]
    assert int(context["cores"]) >= 1
    assert {"python", "distspec", "torch"} <= context.keys()
