"""What `bench asked` runs, on a CPU with models of nothing; its figures need a machine of their own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from distspec import config
from distspec.bench import asked
from distspec.bench.asked import Ask
from distspec.bench.round import Cell, Rounds
from distspec.bench.spelled import ANSWER, Vocabulary
from distspec.constraints import Matcher
from distspec.errors import ConfigError
from distspec.models import random_model
from distspec.models.llama import Llama
from tests.shapes import TINY

CPU = torch.device("cpu")
VOCABULARY = Vocabulary(400)
GRAMMARS = VOCABULARY.grammars()


def model(seed: int = 1, vocab: int = 400) -> Llama:
    shape = dataclasses.replace(TINY, vocab_size=vocab)
    return random_model(shape, seed=seed, dtype=torch.float32, device=CPU)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("round", "asked"):
        monkeypatch.setattr(f"distspec.bench.{module}.CONTEXT", 20)


@pytest.mark.parametrize(("steps", "overlap"), [(0, True), (0, False), (2, True)])
@pytest.mark.parametrize("ask", asked.asks(VOCABULARY), ids=lambda ask: ask.name)
def test_rounds_bring_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, ask: Ask, steps: int, overlap: bool) -> None:
    options = config.Engine(max_num_seqs=4, num_pages=300, page_size=4)
    bench = Rounds(model(), model(2), options, None, CPU, max_model_len=150, grammars=GRAMMARS)
    GRAMMARS.find(ANSWER).result()
    answers: list[list[int]] = []
    leave = bench._leave

    def left() -> None:
        answers.extend(list(bench.target.sequence(slot).tokens[19:]) for slot in bench._slots)
        leave()

    monkeypatch.setattr(bench, "_leave", left)
    _, tokens = bench.timed(Cell(4, steps, overlap), 12, ask.asks, ask.root)
    assert 1 <= tokens <= steps + 1
    for engine in (bench.target, bench.drafter):
        engine.check()
        assert engine.books.allocator.free == 300
    if ask.name == "json":
        for answer in answers:
            assert len(answer) >= 18
            assert VOCABULARY.end not in answer
            assert Matcher(GRAMMARS.find(ANSWER).result()).allowed(answer) == len(answer)


def test_rows_compare_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "load_model", lambda name, **_: model(len(name)))
    rows = asked.measure(["a+bc"], ["json"], [1], 3, 2, config.Engine(page_size=4))
    assert [row.name for row in rows] == ["asked/a+bc/ar/b16/json", "asked/a+bc/sd1/b16/json"]
    for row in rows:
        assert row.context["more_ms"] == pytest.approx(row.value - row.reference)


def test_what_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "load_model", lambda name, **_: model(len(name)))
    with pytest.raises(ConfigError, match="need some of json, chain"):
        asked.measure(["a+bc"], ["xml"], [1], 3, 2, config.Engine())
    for pair in ("a", "a+", "+a", "a+b+c", ""):
        with pytest.raises(ConfigError, match=r"^pairs: .*need a target and a drafter"):
            asked.measure(["a+bc", pair], ["json"], [1], 3, 2, config.Engine())


def test_models_of_two_vocabularies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "load_model", lambda name, **_: model(vocab=400 + len(name)))
    with pytest.raises(ConfigError, match="one vocabulary"):
        asked.measure(["a+bc"], ["json"], [1], 3, 2, config.Engine(page_size=4))
