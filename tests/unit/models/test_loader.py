"""A name leads to a folder, or to an error that says where was looked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from distspec.errors import ModelNotFound
from distspec.models import load_model, load_tokenizer, model_folder, random_model, save_pretrained
from tests.shapes import LLAMA

CPU = torch.device("cpu")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache on a machine that is offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(hub: Path, owner: str, name: str) -> Path:
    """Where the hub's cache keeps the files of owner/name."""
    revision = "0" * 40
    entry = hub / f"models--{owner}--{name}"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(revision)
    (entry / "snapshots" / revision).mkdir(parents=True)
    return entry / "snapshots" / revision


def test_a_folder_names_itself(tmp_path: Path) -> None:
    save_pretrained(random_model(LLAMA, seed=0, dtype=torch.float32, device=CPU), tmp_path)
    assert model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_names_the_file(missing: str, tmp_path: Path) -> None:
    save_pretrained(random_model(LLAMA, seed=0, dtype=torch.float32, device=CPU), tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ModelNotFound, match=missing):
        model_folder(str(tmp_path))


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    save_pretrained(random_model(LLAMA, seed=0, dtype=torch.float32, device=CPU), tmp_path)
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_name_of_no_kind_says_where_was_looked() -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2-135m.*folder .*no-such-model.*not a hub id"):
        model_folder("no-such-model")


def test_a_hub_model_in_the_cache_needs_no_network(hub: Path) -> None:
    model = random_model(LLAMA, seed=0, dtype=torch.float32, device=CPU)
    save_pretrained(model, cached(hub, "someone", "tiny"))
    found = load_model("someone/tiny", dtype=torch.float32, device=CPU)
    assert torch.equal(found.embedding, model.embedding)


def test_an_unreachable_hub_model_says_where_was_looked(hub: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"folder .*someone/tiny; hub cache .*; hub http"):
        model_folder("someone/tiny")


def test_half_a_hub_model_in_the_cache_is_not_used(hub: Path) -> None:
    save_pretrained(random_model(LLAMA, seed=0, dtype=torch.float32, device=CPU), cached(hub, "someone", "tiny"))
    next(hub.rglob("model.safetensors")).unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        model_folder("someone/tiny")
