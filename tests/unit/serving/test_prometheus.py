"""What is exposed is what Prometheus' own parser reads back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from distspec.metrics import Registry
from distspec.serving.prometheus import exposition

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=12)


@given(label=NAMES, help=NAMES, value=st.floats(0, 1e9), seen=st.lists(st.floats(0, 100), max_size=20))
def test_samples_survive_the_trip(label: str, help: str, value: float, seen: list[float]) -> None:
    registry = Registry()
    registry.counter("sent_total", help, ["to"]).add(value, to=label)
    registry.gauge("level", "Now").set(value)
    histogram = registry.histogram("took_seconds", "Time", ["to"])
    for size in seen:
        histogram.observe(size, to=label)
    read = {family.name: family for family in text_string_to_metric_families(exposition(registry.snapshot()))}
    [sent] = read["sent"].samples
    assert (sent.labels, sent.value) == ({"to": label}, value)
    assert read["level"].samples[0].value == value
    took = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in (read["took_seconds"].samples if seen else ())
    }
    for bound in histogram.bounds if seen else ():
        assert took["took_seconds_bucket", repr(bound)] == sum(size <= bound for size in seen)
    if seen:
        assert took["took_seconds_count", None] == took["took_seconds_bucket", "+Inf"] == len(seen)
        assert took["took_seconds_sum", None] == sum(seen)


def test_one_header_for_the_same_metric_of_two_processes() -> None:
    registries = [Registry(), Registry()]
    for i, registry in enumerate(registries):
        registry.gauge("up", "Is up", ["worker"]).set(1, worker=str(i))
    text = exposition([family for registry in registries for family in registry.snapshot()])
    assert text.count("# TYPE up gauge") == 1
    assert text.count("\nup{") == 2
