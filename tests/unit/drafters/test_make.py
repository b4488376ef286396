"""A configuration names its drafter: those with a draft model of their own kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distspec import drafters
from distspec.config import Engine as Options
from distspec.config import load
from distspec.drafters.base import taps_of
from distspec.engine import Engine
from distspec.errors import ConfigError, InvalidValue
from distspec.models import save_pretrained
from distspec.models.draft_checkpoint import save_draft
from distspec.protocol.values import SamplingParams, Shape
from distspec.workers.fingerprint import fingerprint
from tests.desks import desk, lease, run, stream
from tests.featured import ALL, CPU, SHAPE, features, made, target

TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3)
KINDS = ["eagle", "eagle3", "mtp", "dflash"]


def configured(folder: Path, kind: str, scratch: int = 64, **more: object) -> drafters.Drafter:
    """The drafter of a kind whose target and draft model lie in folders."""
    save_pretrained(target(), folder / "target")
    save_draft(made(kind), folder / "draft")
    tree = {
        "model": {"name": str(folder / "target"), "dtype": "float32"},
        "engine": {"page_size": 4, "num_pages": 300, "max_scratch_nodes": scratch},
        "speculation": {"branch_nodes": 1, "placement": "local", "drafter": kind, "draft_model": str(folder / "draft")},
    }
    config = load(tree)
    model = drafters.draft_model(config, device=CPU, **more)  # type: ignore[arg-type]
    found = drafters.make(config, model, max_model_len=SHAPE.max_position, device=CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_with_or_without_the_target_at_hand_it_is_the_same_drafter(kind: str, tmp_path: Path) -> None:
    shape, params = Shape(steps=3, topk=2, nodes=9), SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    found = []
    for more in ({}, {"target": target()}):
        subject = configured(tmp_path, kind, **more)
        assert taps_of(subject) == ALL[kind].taps
        row = drafters.DraftRow(1, 0, TEXT, shape, params, features(list(TEXT), taps_of(subject)))
        found += subject.propose([row])
    assert found[0] == found[1]
    assert len(found[0].tokens) > 2


def _break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


BROKEN: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "no number": lambda folder: edit(folder, num_hidden_layers="x"),
    "no such architecture": lambda folder: edit(folder, hidden_act="gelu"),
    "another vocabulary": lambda folder: edit(folder, vocab_size=24),
    "no seed": lambda folder: edit(folder, random_weights="x"),
    "no tensors": lambda folder: (folder / "model.safetensors").write_bytes(b"x"),
    "no index": _break_index,
}


def blamed(reads: Callable[[], object]) -> str | None:
    """The key that is said to be wrong, if one is."""
    try:
        reads()
    except ConfigError as error:
        return error.path
    return None


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", ["standalone", *KINDS])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_draft_model_is_blamed_and_not_the_target(kind: str, broken: str, tmp_path: Path) -> None:
    save_pretrained(target(), tmp_path / "target")
    if kind == "standalone":
        save_pretrained(target(), tmp_path / "draft")
    else:
        save_draft(made(kind), tmp_path / "draft")
    named = {"placement": "local", "drafter": kind, "draft_model": str(tmp_path / "draft")}
    config = load({"model": {"name": str(tmp_path / "target")}, "speculation": named})
    drafters.draft_model(config, device=CPU)
    fingerprint(config, CPU)
    BROKEN[broken](tmp_path / "draft")
    assert blamed(lambda: drafters.draft_model(config, device=CPU)) == "speculation.draft_model"
    assert blamed(lambda: fingerprint(config, CPU)) in (None, "speculation.draft_model")


def test_a_block_of_more_rows_than_scratch_is_refused_with_how_many_it_takes(tmp_path: Path) -> None:
    configured(tmp_path, "dflash", scratch=5)
    with pytest.raises(InvalidValue, match=r"^engine\.max_scratch_nodes: got 4, need >= 5, "):
        configured(tmp_path, "dflash", scratch=4)


def test_a_draft_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_pretrained(target(), tmp_path / "target")
    save_draft(made("eagle3"), tmp_path / "draft", "speculators")
    speculation = {"placement": "local", "drafter": "eagle", "draft_model": str(tmp_path / "draft")}
    config = load({"model": {"name": str(tmp_path / "target")}, "speculation": speculation})
    with pytest.raises(ConfigError, match=r"speculation\.draft_model.*eagle3"):
        drafters.draft_model(config, device=CPU)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 5])
def test_a_random_draft_model_changes_no_token(
    kind: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A desk whose engine hands it features, rounds of trees, two requests at once; and the engine alone."""
    params = SamplingParams(max_tokens=24, temperature=0.0 if seed is None else 1.0, seed=seed or 0)
    drafter, streams, trees = configured(tmp_path, kind), [], []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda rows: (trees.append(propose(rows)), trees[-1])[1])
    for subject in (None, drafter):
        options = Options(page_size=4, num_pages=300)
        engine = Engine(target(), options, device=CPU, max_model_len=SHAPE.max_position, taps=taps_of(subject))
        of = desk(engine, subject)
        shape = Shape(steps=3, topk=2, width=2, nodes=8) if subject else None
        for request, prompt in ((1, TEXT), (2, TEXT[4:])):
            of.receive(lease(request, prompt, params, shape=shape, nodes=8 if subject else 0))
        replies = run(of)
        streams.append([stream(replies, request) for request in (1, 2)])
    assert streams[0] == streams[1]
    assert [len(tokens) for tokens in streams[0]] == [24, 24]
    assert sum(len(tree.tokens) > 1 for found in trees for tree in found) > 20
    drafter.check()
