"""What is counted: drafts that are kept, of rounds that had as many as a round can have."""

from __future__ import annotations

import pytest

from distspec.bench.acceptance import Counts, rounds_of, synthetic
from distspec.protocol.values import SamplingParams
from tests.desks import model

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


def test_random_first_drafts_are_kept_as_often_as_distributions_overlap() -> None:
    rows = {row.name.rpartition("/")[2]: row for row in synthetic([0.7], steps=3, rounds=600, vocab=50)}
    assert rows["coupled"].ratio == 1
    first, overlap = (float(rows["ratio"].context[key]) for key in ("first", "overlap"))
    assert abs(first - overlap) < 4 * (overlap * (1 - overlap) / 600) ** 0.5
    assert rows["coupled"].value < rows["block"].value


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block"])
def test_a_greedy_target_that_drafts_all_its_layers_keeps_everything(rule: str) -> None:
    of, params = model(), SamplingParams(max_tokens=20, temperature=0.0)
    kept = list(rounds_of(rule, of, of.config.num_layers, PROMPTS, params, steps=3))
    assert kept == [3] * 2 * 4  # a prefill's token, four rounds of four, and a last one that is shorter


def test_a_figure_says_how_sure_it_is() -> None:
    row = Counts([0, 2] * 50).row("a", Counts([1, 1]), {})
    assert (row.value, row.reference, row.ratio) == (1, 1, 1)
    assert row.context["first"] == 0.5
    assert row.context["error"] == pytest.approx(0.1)
