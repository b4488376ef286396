"""The picture shows what was kept solid and what was wasted hatched, for as much of the bar as its share."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.colors import to_rgb
from msgspec.structs import replace

from distspec.bench.timeline import COLOURS, WIDTH_PX, draw
from distspec.trace import Span

LIFE = [
    Span("queue", 10.0, 10.001, "coordinator", 1, {"key": "a"}),
    Span("prefill", 10.001, 10.020, "prefill:0", 1, task=1, brought=1, kept=1),
    Span("transfer", 10.020, 10.022, "decode:0", 1),
    Span("commit", 10.021, 10.021, "coordinator", 1, {"tokens": 1}),
    Span("commit", 10.060, 10.061, "coordinator", 1, {"tokens": 3}),
]


def shares(path: Path) -> dict[str, int]:
    """Pixels of each colour of work."""
    pixels = image.imread(path)[..., :3]
    return {name: int((abs(pixels - to_rgb(colour)).max(axis=2) < 0.02).sum()) for name, colour in COLOURS.items()}


def drawn(path: Path, *spans: Span) -> dict[str, int]:
    draw([*LIFE, *spans], path)
    return shares(path)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return tmp_path / "life.png"


@pytest.mark.parametrize("kind", ["verify", "draft", "decode", "round"])
def test_a_bar_is_solid_for_as_much_as_was_kept(kind: str, picture: Path) -> None:
    work = Span(kind, 10.025, 10.060, f"{kind}:0", 1, task=2, brought=4)
    whole, half, none = (drawn(picture, replace(work, kept=kept))[kind] for kept in (4, 2, 0))
    assert none < 0.05 * whole  # the legend's sample
    assert abs((half - none) / (whole - none) - 0.5) < 0.05


def test_a_wasted_bar_is_grey_though_it_is_as_narrow_as_its_edges(picture: Path) -> None:
    work = Span("draft", 10.025, 10.0251, "draft:0", 1, task=2, brought=4)
    assert drawn(picture, replace(work, kept=4))["draft"] > drawn(picture, work)["draft"]


def test_every_kind_of_work_is_there_and_the_picture_is_as_wide_as_promised(picture: Path) -> None:
    kinds = [kind for kind in COLOURS if kind not in {span.name for span in LIFE}]
    found = drawn(
        picture, *(Span(kind, 10.03, 10.04, f"{kind}:0", 1, task=i, brought=1, kept=1) for i, kind in enumerate(kinds))
    )
    assert all(found.values()), found
    assert image.imread(picture).shape[1] == WIDTH_PX


def test_futures_of_one_worker_that_overlap_hide_none_of_each_other(picture: Path) -> None:
    one = Span("verify", 10.02, 10.05, "verify:0", 1, task=2, brought=2, kept=2)
    other = replace(one, start_s=10.03, end_s=10.06, task=3)
    alone, both = drawn(picture, one)["verify"], drawn(picture, one, other)["verify"]
    assert both > 1.5 * alone


def test_a_long_life_is_cut_into_stretches_in_which_its_bars_can_be_seen(picture: Path) -> None:
    times = [10.06 + 0.01 * i for i in range(500)]
    spans = [Span("verify", t, t + 0.009, "verify:0", 1, task=i, brought=1, kept=1) for i, t in enumerate(times)]
    draw([*LIFE, *spans], picture)
    tall = image.imread(picture).shape[0]
    draw([*LIFE, *spans[:5]], picture)
    assert tall > 2 * image.imread(picture).shape[0]


def test_a_life_of_one_moment_is_drawn(picture: Path) -> None:
    draw([Span("queue", 10.0, 10.0, "coordinator", 1, {"key": "a"})], picture)
    assert image.imread(picture).shape[1] == WIDTH_PX
