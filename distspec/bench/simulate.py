"""Each policy in the timed simulator, at its own best sizes for a cell of hardware and load.

Knows curves that ship with the package, and which sizes are worth a try. Does not know rows, tables or files to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import yaml

from distspec.config import CONFIGS
from distspec.coordinator.context import Settings
from distspec.curve import Curve
from distspec.errors import InvalidValue
from distspec.sim.timed import Hardware, Load, Measured, TimedWorld

Sizes = dict[str, Any]
"""Some fields of Settings."""

Key = tuple[tuple[str, Any], ...]
"""The same, to look up."""

Axes = tuple[tuple[Sizes, ...], ...]
"""Per axis, what may be changed along it."""

MOST_NODES = 63
"""Drafted nodes of a tree that are judged in a round: 64 with the root."""

MOST_LIVE = 16_384
"""Live nodes of all requests that are tried: rows bind a drafter long before."""

WARM = 16
"""Tokens per request that come before a measurement."""

LEARNING = 6000
"""The same for `auto`, which begins without knowing anything, at batch 1; a request of a larger batch needs fewer. In
half of these it may still go from trial to trial; it measures 15 to 75 times in all of them."""

FINALS = ((6, 6), (3, 2))
"""After the first search: runs of a so-manieth of the tokens that count, and how many sizes go on to them."""

_GROWTHS = tuple(
    {"branch_width": width, "max_live_nodes": live} for width, live in ((4, 64), (8, 200), (16, 500), (32, 1000))
)
_WIDEST = {"branch_width": 96, "max_live_nodes": 3000}
"""What fixed sizes are tried with besides. `auto` is not: it would take too long to value."""

_BUSHES = (*_GROWTHS, _WIDEST)
_ROUNDS = tuple({"nodes": nodes} for nodes in (4, 8, 16, 32, MOST_NODES))


def _each(name: str, *values: int) -> tuple[Sizes, ...]:
    return tuple({name: value} for value in values)


CHAINS: dict[str, tuple[Sizes, Axes]] = {
    "ar": ({}, ()),
    "sd": ({"steps": 4}, (_each("steps", 1, 2, 3, 4, 5, 6, 7, 8, 10, 12),)),
    "sd112": ({"steps": 1, "nodes": 1}, ()),
    "pearl": ({"steps": 6}, (_each("steps", 1, 2, 3, 4, 5, 6, 8, 10, 12), _each("lookahead", 1, 2, 4))),
    "dsi": ({"lookahead": 4}, (_each("lookahead", 1, 2, 3, 4, 5, 6, 7, 8, 12, 16),)),
    "ssd": (
        {"steps": 5, "lookahead": 4, "nodes": 16, "branch_width": 32, "max_live_nodes": 1000},
        (
            _BUSHES,
            _each("steps", 1, 2, 3, 4, 5, 6, 8),
            _ROUNDS[:3],
            _each("lookahead", 1, 2, 6),
            _each("branch_topk", 2, 3),
        ),
    ),
    "bvsp": (
        {
            "steps": 2,
            "lookahead": 6,
            "nodes": MOST_NODES,
            "branch_nodes": 16,
            "branch_width": 32,
            "max_live_nodes": 1000,
        },
        (
            (*_BUSHES, {**_WIDEST, "lookahead": 5}),  # wide steps take longer: 6 would end just after the verdict
            _each("lookahead", 2, 4, 5, 7, 8),
            _each("steps", 1, 2, 3, 5),
            _ROUNDS,
            _each("branch_nodes", 4, 8),
        ),
    ),
    "auto": ({}, ()),
}
"""Per policy, sizes to start from and axes along which they are improved, one after the other. `auto` finds its own."""

TREES: dict[str, tuple[Sizes, Axes]] = {
    "sd": (
        {"steps": 8, "topk": 4, "nodes": MOST_NODES, "max_live_nodes": 500},
        (_each("steps", 2, 3, 4, 6, 7, 8, 10), _ROUNDS, _each("topk", 2, 3, 5, 6)),
    ),
    "ssd": (
        {**CHAINS["ssd"][0], "topk": 3, "nodes": MOST_NODES},
        (_BUSHES, _each("steps", 2, 3, 4, 5, 6, 8), _ROUNDS[2:], _each("lookahead", 1, 2, 6)),
    ),
    "bvsp": ({**CHAINS["bvsp"][0], "topk": 3}, CHAINS["bvsp"][1]),
}
"""The same for rounds in which trees are judged."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Verifiers that serve `batch` requests, and how often the drafter's guesses of each rank are right."""

    batch: int
    odds: tuple[float, ...]
    verifiers: int


def hardware(name: str) -> Hardware:
    """Curves that ship with the package. Raises InvalidValue for a name that does not."""
    folder = CONFIGS / "curves"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise InvalidValue("simulate", name, f"one of {', '.join(known)}")
    tree = yaml.safe_load((folder / f"{name}.yaml").read_text())
    target, drafter = (msgspec.convert(tree[key], dict[int, float]) for key in ("target", "drafter"))
    return Hardware(Curve(target.items()), Curve(drafter.items()), tree["hop_s"])


def measure(policy: str, on: Hardware, cell: Cell, trees: bool, tokens: int) -> tuple[Sizes, Measured]:
    """The best sizes that were found by short runs, and one of `tokens`, of all requests together, with them.

    Few tokens tell good sizes from bad ones, more tell the good ones apart: so the best of each stage meet again in
    runs of twice as many (successive halving, arXiv 1502.07943). All runs that choose are of the same requests, so that
    luck is the same for all; the one that counts has others, the same for all policies.
    """
    start, axes = (TREES if trees else CHAINS)[policy]
    start = _bounds(cell) if policy == "auto" else start
    start = {**start, **_fitting(start, cell)}
    rate = partial(_rate, policy, on, cell)
    sizes = _halved(lambda one, share: rate(tokens // share, one), start, axes, cell) if axes else start
    return sizes, _run(policy, on, cell, sizes, tokens, seed=1)


def _halved(rate: Callable[[Sizes, int], float], start: Sizes, axes: Axes, cell: Cell) -> Sizes:
    """The best of what was tried. rate: of sizes, by a run of a so-manieth of the tokens that count."""
    tried = _climbed(lambda one: rate(one, 2 * FINALS[0][0]), start, axes, cell)
    for share, most in FINALS:
        best = sorted(tried, key=lambda one: -tried[one])[:most]
        tried = {one: rate(dict(one), share) for one in best}
    winner, _ = max(tried.items(), key=lambda found: found[1])
    return dict(winner)


def _climbed(rate: Callable[[Sizes], float], sizes: Sizes, axes: Axes, cell: Cell) -> dict[Key, float]:
    """What was found of all sizes tried: twice along each axis, or until nothing improves. None is tried twice."""
    tried: dict[Key, float] = {_key(sizes): rate(sizes)}
    for _ in range(2):
        before = sizes
        for axis in axes:
            for change in axis:
                other = sizes | change
                if _live(other) * cell.batch > MOST_LIVE:
                    continue
                if _key(other) not in tried:
                    tried[_key(other)] = rate(other)
                if tried[_key(other)] > tried[_key(sizes)]:
                    sizes = other
        if sizes == before:
            break
    return tried


def _key(sizes: Sizes) -> Key:
    return tuple(sorted(sizes.items()))


def _fitting(sizes: Sizes, cell: Cell) -> Sizes:
    """No more live nodes to start from than are tried."""
    live = sizes.get("max_live_nodes")
    return {} if live is None else {"max_live_nodes": min(live, MOST_LIVE // cell.batch)}


def _bounds(cell: Cell) -> Sizes:
    """What trees may grow to under `auto`: the most that the policies which branch are tried with."""
    return max((some for some in _GROWTHS if _live(some) * cell.batch <= MOST_LIVE), key=_live, default=_GROWTHS[0])


def _live(sizes: Sizes) -> int:
    live: int = sizes.get("max_live_nodes", 64)
    return live


def _rate(policy: str, on: Hardware, cell: Cell, tokens: int, sizes: Sizes) -> float:
    return _run(policy, on, cell, sizes, tokens, seed=0).tokens_s


def _run(policy: str, on: Hardware, cell: Cell, sizes: Sizes, tokens: int, seed: int) -> Measured:
    """The drafter's confidence is how often it is right; scratch has room for every live node."""
    room = max(64, sizes.get("max_live_nodes", 0))
    settings = Settings(policy="sd" if policy == "sd112" else policy, static=False, room=room, **sizes)
    load = Load(cell.batch, cell.odds, seed=seed * 1_000_000)
    warm = round(LEARNING / cell.batch ** (1 / 3)) if policy == "auto" else WARM
    return TimedWorld(on, settings, load, cell.verifiers).measure(max(24, tokens // cell.batch), warm)
