"""Answers that end where the model does: fewer positions are left than a round drafts, or a prompt takes nearly all."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distspec.models.llama import Llama
from tests.matrix import DRAFTERS, GREEDY, LONG, PAGES, POLICIES, READERS, SEEDED, SHAPE, TREES, Cell
from tests.teacher import excused, plain

pytestmark = pytest.mark.usefixtures("one_thread")

ROOMS = (1, 2, 3, 4, 6, 9, 30)
"""Positions left; rounds of these cells draft up to nine."""
CELLS = [
    Cell(policy, i % 3, (*DRAFTERS[1:4], *READERS)[(3 * i + colocated) % 7], colocated, PAGES[i % 4], tree)
    for i, policy in enumerate(POLICIES)
    for colocated, tree in ((True, list(TREES)[i % 3]), (False, list(TREES)[(i + 1) % 3]))
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.policy}-{cell.colocated}-{cell.drafter}-{cell.tree}")
def test_answers_reach_the_last_position_and_are_the_plain_targets(cell: Cell, target: Llama) -> None:
    fleet, asked = cell.fleet(target, seed=CELLS.index(cell)), {}
    for i, room in enumerate(ROOMS):
        prompt = (LONG * 3)[i : i + SHAPE.max_position - room]
        asked[str(room)] = prompt, replace(SEEDED if i % 2 else GREEDY, max_tokens=room)
        fleet.submit(str(room), *asked[str(room)])
    fleet.run()
    for key, (prompt, params) in asked.items():
        got = fleet.streams[key]
        assert (len(prompt) + len(got.tokens), got.finished) == (SHAPE.max_position, "length")
        if got.tokens != plain(target, prompt, params)[0]:
            assert excused(target, prompt, got.tokens, params) > 0
