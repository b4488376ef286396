"""Counters, gauges and histograms of one process, and their values at a moment.

Knows names, labels and numbers. Does not know who publishes them, neither Ray nor Prometheus. A registry is
an argument, never a global.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, TypeVar

from msgspec import Struct

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Histogram bounds for durations."""


class Sample(Struct, frozen=True):
    """One series. value: of a counter or gauge, or the sum of a histogram's observations.

    counts[i]: observations <= bounds[i] of the family and > bounds[i - 1]; the last one: beyond all bounds.
    """

    labels: dict[str, str]
    value: float
    counts: tuple[int, ...] = ()


class Family(Struct, frozen=True):
    """One metric with all its series. bounds: of a histogram's buckets, ascending."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[Sample, ...]
    bounds: tuple[float, ...] = ()


class _Metric:
    kind: Literal["counter", "gauge", "histogram"]

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}

    def _key(self, labels: dict[str, str]) -> tuple[str, ...]:
        if labels.keys() != set(self.labels):
            raise ValueError(f"{self.name} has the labels {list(self.labels)}, got {list(labels)}")
        return tuple(labels[name] for name in self.labels)

    def snapshot(self) -> Family:
        samples = tuple(Sample(self._named(key), value) for key, value in list(self._values.items()))
        return Family(self.name, self.kind, self.help, samples)

    def _named(self, key: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(self.labels, key, strict=True))


class Counter(_Metric):
    """A number that only grows."""

    kind = "counter"

    def add(self, amount: float = 1.0, **labels: str) -> None:
        if amount < 0:
            raise ValueError(f"{self.name} is a counter: {amount} < 0")
        key = self._key(labels)
        self._values[key] = self._values.get(key, 0.0) + amount


class Gauge(_Metric):
    """A number that is what it is now."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        self._values[self._key(labels)] = value

    def clear(self) -> None:
        """Forget all series, for a gauge whose labels come and go."""
        self._values.clear()


class Histogram(_Metric):
    """How often which size was seen."""

    kind = "histogram"

    def __init__(self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        super().__init__(name, help, labels)
        self.bounds = tuple(sorted(bounds))
        self._counts: dict[tuple[str, ...], list[int]] = {}

    def observe(self, value: float, **labels: str) -> None:
        key = self._key(labels)
        counts = self._counts.setdefault(key, [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        self._values[key] = self._values.get(key, 0.0) + value

    def snapshot(self) -> Family:
        samples = tuple(
            Sample(self._named(key), self._values[key], tuple(counts)) for key, counts in list(self._counts.items())
        )
        return Family(self.name, self.kind, self.help, samples, self.bounds)


_AnyMetric = TypeVar("_AnyMetric", bound=_Metric)


class Registry:
    """The metrics of one process; one thread writes each."""

    def __init__(self) -> None:
        self._metrics: dict[str, _Metric] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return self._add(Counter(name, help, labels))

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        return self._add(Gauge(name, help, labels))

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), bounds: Sequence[float] = SECONDS
    ) -> Histogram:
        return self._add(Histogram(name, help, labels, bounds))

    def snapshot(self) -> list[Family]:
        return [metric.snapshot() for metric in self._metrics.values()]

    def _add(self, metric: _AnyMetric) -> _AnyMetric:
        if metric.name in self._metrics:
            raise ValueError(f"metric {metric.name} exists")
        self._metrics[metric.name] = metric
        return metric
