"""`bench policies --simulate`: rows, sizes and picture of a small cell, from the command down to the machine."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from typer.testing import CliRunner

from distspec.bench import simulate
from distspec.bench.bars import draw_simulated
from distspec.bench.policies import counts, numbers, odds
from distspec.bench.report import Row
from distspec.bench.simulate import Cell, hardware, measure
from distspec.cli.bench import app
from distspec.errors import InvalidValue


def test_the_curves_are_the_measured_ones() -> None:
    on = hardware("h200-32b-0.6b")
    assert (on.target(1), on.drafter(1), on.hop_s) == (0.020, 0.0014, 0.00015)
    # Of docs/design.md: 256 rows cost 33.1 ms where one costs 18.8; and beyond, the last slope goes on.
    assert on.target(256) / on.target(1) == pytest.approx(33.1 / 18.8, rel=1e-3)
    assert on.target(384) - on.target(256) == pytest.approx(on.target(256) - on.target(128))
    assert hardware("h200-8b-0.6b").target(1) == 0.0051


def test_unknown_curves_are_refused_with_those_that_ship() -> None:
    with pytest.raises(InvalidValue, match="h200-32b"):
        hardware("h100")


@pytest.mark.parametrize("text", ["", "1,x", "-1", "nan", "inf"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    for most in (1, None):
        with pytest.raises(InvalidValue, match="acceptance"):
            numbers("acceptance", text, 0, most)


@pytest.mark.parametrize("text", ["", "0", "1.5", "2,inf", "nan"])
def test_counts_are_whole_and_finite(text: str) -> None:
    with pytest.raises(InvalidValue, match="batch"):
        counts("batch", text)
    assert counts("batch", "1,8,1e2") == [1, 8, 100]


def test_odds_of_further_guesses_are_of_what_the_first_leaves() -> None:
    assert odds(0.7) == pytest.approx((0.7, 0.15, 0.05))


def test_sizes_follow_the_acceptance() -> None:
    """A drafter that is seldom right is asked for less, and the sizes that are found are better than others."""
    on = hardware("h200-32b-0.6b")
    bad, _ = measure("sd", on, Cell(1, (0.3, 0.1), 1), trees=False, tokens=600)
    good, figures = measure("sd", on, Cell(1, (0.9, 0.05), 1), trees=False, tokens=600)
    assert bad["steps"] < good["steps"]
    assert figures.tokens_s > 1.5 / on.target(1)


@pytest.mark.parametrize("seed", range(5))
def test_what_short_runs_confuse_longer_ones_tell_apart(seed: int) -> None:
    """Sizes that lie within what a short run varies by: the best is found all the same, and few get long runs."""
    lengths, luck = [], Random(seed)

    def rate(sizes: simulate.Sizes, share: int) -> float:
        lengths.append(share)
        return -abs(int(sizes["steps"]) - 5) + luck.uniform(-1, 1) * share / 8

    steps = tuple({"steps": steps} for steps in range(1, 13))
    assert simulate._halved(rate, {"steps": 1}, (steps,), Cell(1, (0.5,), 1)) == {"steps": 5}
    assert 1 < lengths.count(min(lengths)) < lengths.count(max(lengths)) / 4


def test_the_command_writes_a_row_per_policy_and_a_picture(tmp_path: Path) -> None:
    rows, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    cell = ["--batch", "1", "--verifiers", "1", "--synthetic", "0.8,0.1", "--tokens", "240"]
    result = CliRunner().invoke(app, ["policies", "--simulate", "h200-8b-0.6b", *cell, "--json", str(rows)])
    assert result.exit_code == 0, result.output
    read = msgspec.json.decode(rows.read_bytes(), type=list[Row])
    assert [row.name for row in read] == [
        f"sim/{policy}/b1/a0.8/v1" for policy in ("ar", "sd", "sd112", "pearl", "dsi", "ssd", "bvsp", "auto")
    ]
    assert all(row.context["synthetic"] == "0.8,0.1" for row in read)
    assert read[0].ratio == 1.0
    assert read[0].value == pytest.approx(1 / 0.0051, rel=0.01)
    assert read[1].ratio > 1.0
    assert read[-1].ratio > 0.97
    assert set(read[-1].context) & {"branch_width", "max_live_nodes", "steps"} == {"branch_width", "max_live_nodes"}
    draw_simulated(read, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
