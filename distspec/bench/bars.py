"""Pictures of policies side by side: a group of bars for each load, a bar for each policy.

Knows rows and how they are named. Does not know how anything was measured. Imports matplotlib; whoever needs no picture
does not import this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distspec.bench.policies import FIGURES
from distspec.bench.report import Row

Groups = dict[str, dict[str, float]]
"""Per group of bars, their heights by policy."""


def draw_simulated(rows: Sequence[Row], file: Path) -> None:
    """Speed-up over `ar`, one panel per number of verifiers, one group per batch and acceptance. Writes a PNG."""
    panels: dict[str, Groups] = {}
    for one in rows:
        _, policy, batch, acceptance, verifiers, *shape = one.name.split("/")
        groups = panels.setdefault(verifiers, {})
        groups.setdefault(f"{batch} {acceptance}", {})["/".join([policy, *shape])] = one.ratio
    picture = Figure(figsize=(12, 3.5 * len(panels)), layout="constrained")
    for i, (verifiers, groups) in enumerate(panels.items()):
        axes = picture.add_subplot(len(panels), 1, i + 1)
        axes.set_title(f"{verifiers.removeprefix('v')} verifier(s)")
        axes.set_ylabel("tokens/s over ar")
        _bars(axes, groups)
        axes.axhline(1.0, color="black", linewidth=0.5)
    picture.axes[0].legend(ncols=5, fontsize="small")
    picture.savefig(file)


def draw_live(rows: Sequence[Row], file: Path) -> None:
    """A panel for each figure of runs on a fleet, one group per batch. Writes a PNG."""
    picture = Figure(figsize=(14, 11), layout="constrained")
    panels = picture.subplots(4, 2).flatten()
    _panel(panels[0], "tokens/s", {one.name: one.value for one in rows})
    _panel(panels[1], "tokens/s over ar", {one.name: one.ratio for one in rows})
    panels[1].axhline(1.0, color="black", linewidth=0.5)
    for axes, (title, key) in zip(panels[2:], FIGURES.items(), strict=True):
        _panel(axes, title, {one.name: float(one.context[key]) for one in rows})
    facts = rows[0].context
    made_up = f", guesses made up to be right with {facts['synthetic']}" if "synthetic" in facts else ""
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)
    picture.suptitle(f"{facts['model']}, drafter {facts['drafter']}{made_up}")
    picture.savefig(file)


def draw_rounds(rows: Sequence[Row], file: Path) -> None:
    """Speed over plain decoding, and the device's idle share with rounds that overlap and with those that wait: a line
    of panels for each pair, one group per batch. Writes a PNG."""
    pairs = list(dict.fromkeys(one.name.split("/")[1] for one in rows))
    picture = Figure(figsize=(15, 4 * len(pairs)), layout="constrained")
    for line, pair in zip(picture.subplots(len(pairs), 3, squeeze=False), pairs, strict=True):
        own = [one for one in rows if one.name.split("/")[1] == pair]
        waits = [one for one in own if one.name.endswith("/waits")]
        overlap = [one for one in own if one not in waits]
        for axes, title, some, key in (
            (line[0], "tokens/s over ar", overlap, "over_ar"),
            (line[1], "idle share, overlapped", overlap, "idle"),
            (line[2], "idle share, one by one", waits, "idle"),
        ):
            shown = {one.name.replace(f"/{pair}", ""): float(one.context[key]) for one in some}
            _panel(axes, f"{pair}: {title}", shown)
        line[0].legend(fontsize="small")
    picture.savefig(file)


def _panel(axes: Axes, title: str, heights: dict[str, float]) -> None:
    """heights: by name of the row."""
    groups: Groups = {}
    for name, height in heights.items():
        _, policy, batch, *_ = name.split("/")
        groups.setdefault(batch, {})[policy] = height
    _bars(axes, groups)
    axes.set_title(title)


def _bars(axes: Axes, groups: Groups) -> None:
    kinds = list(dict.fromkeys(kind for bars in groups.values() for kind in bars))
    width = 1 / (len(kinds) + 1)
    for i, kind in enumerate(kinds):
        at = [group + (i + 0.5) * width for group in range(len(groups))]
        axes.bar(at, [bars.get(kind, 0.0) for bars in groups.values()], width, label=kind)
    axes.set_xticks([group + 0.5 for group in range(len(groups))], list(groups))
