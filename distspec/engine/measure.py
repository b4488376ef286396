"""What wider steps cost an engine, by the clock.

Knows steps of one slot. Does not know what computes them, or what the costs are for.
"""

from __future__ import annotations

import time
from statistics import median

from distspec.engine.batch import Segment
from distspec.engine.engine import Engine
from distspec.errors import OutOfPages
from distspec.protocol.values import ROOT, Node, SamplingParams

ROWS = (1, 2, 4, 8, 16)
_SECONDS = 0.8
_CONTEXT = 16


def step_costs(engine: Engine) -> tuple[float, ...]:
    """Median time of a step of each number of ROWS in units of one row; empty if the pool is too small, or texts too
    short.

    Takes about a second; to be called before requests arrive. Needs a free slot.
    """
    if engine.max_model_len <= _CONTEXT:
        return ()
    slot = engine.open((), SamplingParams(max_tokens=1, temperature=0.0), use_cache=False)
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    try:
        engine.reserve(slot, _CONTEXT + max(ROWS))
        engine.step([Segment(slot, (0,) * _CONTEXT, want=False)])
        for rows in ROWS:
            _timed(engine, slot, rows)  # what the first step of a kind takes besides is no cost of the next
        deadline = time.perf_counter() + _SECONDS
        while not times[1] or time.perf_counter() < deadline:
            for rows in ROWS:
                times[rows].append(_timed(engine, slot, rows))
    except OutOfPages:
        return ()
    finally:
        engine.close(slot, keep=False)
    one = median(times[1])
    return tuple(median(times[rows]) / one for rows in ROWS)


def _timed(engine: Engine, slot: int, rows: int) -> float:
    """Seconds of a step of sibling nodes, which are dropped again."""
    nodes = tuple(Node(id=i, parent=ROOT, token=0) for i in range(rows))
    start = time.perf_counter()
    engine.step([Segment(slot, (), nodes)])
    end = time.perf_counter()
    engine.commit(slot, (), drop=range(rows))
    return end - start
