"""A registry's values as Ray metrics, so that a cluster's own Prometheus and dashboards show them.

Ray takes increments and observations, not totals: counters are mirrored by what they grew, histograms by their
sum and count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator

from ray.util.metrics import Counter, Gauge

from distspec.metrics import Family, Sample

log = logging.getLogger(__name__)


class Mirror:
    """fleet: value of the tag `fleet` on every series."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    async def follow(self, families: Callable[[], Iterable[Family]], every_s: float) -> None:
        """Publish what is read, for ever. What fails once may do so for a moment, and is nobody's death."""
        while True:
            await asyncio.sleep(every_s)
            try:
                self.publish(families())
            except Exception as error:
                log.warning("Ray's metrics are out of date: %s: %s", type(error).__name__, error)

    def publish(self, families: Iterable[Family]) -> None:
        for family in families:
            for sample in family.samples:
                for name, value, grows in _values(family, sample):
                    tags = {**sample.labels, "fleet": self._fleet}
                    if grows:
                        self._grow(name, family.help, value, tags)
                    else:
                        self._gauge(name, family.help, tags).set(value, tags)

    def _grow(self, name: str, text: str, total: float, tags: dict[str, str]) -> None:
        key = name, tuple(sorted(tags.items()))
        growth = total - self._totals.get(key, 0.0)
        if name not in self._counters:
            self._counters[name] = Counter(name, text, tuple(tags))
        if growth > 0:
            self._counters[name].inc(growth, tags)
        self._totals[key] = total

    def _gauge(self, name: str, text: str, tags: dict[str, str]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, tuple(tags))
        return self._gauges[name]


def _values(family: Family, sample: Sample) -> Iterator[tuple[str, float, bool]]:
    """Name, value, and whether it only grows, of what one sample becomes."""
    if family.kind == "histogram":
        yield f"{family.name}_sum", sample.value, True
        yield f"{family.name}_count", float(sum(sample.counts)), True
    else:
        yield family.name, sample.value, family.kind == "counter"
