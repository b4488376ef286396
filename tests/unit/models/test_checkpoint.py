"""Folders hold what was saved, however the files are cut, and damage is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distspec.errors import ConfigError, ModelNotFound
from distspec.models import fingerprint, load_model, random_model, save_pretrained
from distspec.models.checkpoint import INDEX, PICKLED, SINGLE
from distspec.models.llama import Llama
from tests.shapes import KINDS, LLAMA

CPU = torch.device("cpu")


def make(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Llama:
    return random_model(KINDS[kind], seed=3, dtype=dtype, device=CPU)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
    return load_model(str(folder), dtype=dtype, device=CPU)


def same(a: Llama, b: Llama) -> bool:
    return a.config == b.config and all(torch.equal(w, b.weights[name]) for name, w in a.weights.items())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_pretrained(make(), tmp_path / "saved")
    return tmp_path / "saved"


def shard(source: Path, folder: Path, count: int) -> Path:
    """The same model as others publish it: tensors by name over several files, with an index."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = load_file(source / SINGLE)
    where = {name: f"model-{i % count}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loaded_is_what_was_saved(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_pretrained(make(kind, dtype), tmp_path)
    assert same(load(tmp_path, dtype), make(kind, dtype))


def test_the_safetensors_package_reads_the_same(saved: Path) -> None:
    tensors = load_file(saved / SINGLE)
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(torch.cat((q, k, v)), make().weights["layers.1.qkv"])


@pytest.mark.parametrize("count", [1, 3])
def test_shards_do_not_matter(saved: Path, tmp_path: Path, count: int) -> None:
    cut = shard(saved, tmp_path / "cut", count)
    assert same(load(cut), load(saved))
    assert fingerprint(cut) == fingerprint(saved)


def test_the_stored_dtype_is_mapped_not_copied(saved: Path) -> None:
    weights = load(saved).weights.values()
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1


def test_another_dtype_is_the_rounded_one(saved: Path) -> None:
    found = load(saved, torch.bfloat16)
    assert all(torch.equal(w.bfloat16(), found.weights[name]) for name, w in make().weights.items())


def test_writing_to_a_mapped_weight_leaves_the_file_alone(saved: Path) -> None:
    load(saved).embedding.zero_()
    assert same(load(saved), make())


def test_a_misaligned_file_is_read_all_the_same(saved: Path) -> None:
    raw = (saved / SINGLE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    (saved / SINGLE).write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    assert same(load(saved), make())


def test_fingerprints_name_weights_and_shape(saved: Path, tmp_path: Path) -> None:
    seen = {fingerprint(saved)}
    for name, weight in make().weights.items():
        save_pretrained(Llama(LLAMA, make().weights | {name: weight * 1.01}), tmp_path / "changed")
        seen.add(fingerprint(tmp_path / "changed"))
    save_pretrained(make(dtype=torch.bfloat16), tmp_path / "half")
    save_pretrained(Llama(replace(LLAMA, rope_theta=5e5), make().weights), tmp_path / "rope")
    seen |= {fingerprint(tmp_path / "half"), fingerprint(tmp_path / "rope")}
    assert len(seen) == len(make().weights) + 3
    shutil.copytree(saved, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == fingerprint(saved)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_cut_off_file_is_refused(saved: Path, keep: int) -> None:
    raw = (saved / SINGLE).read_bytes()
    (saved / SINGLE).write_bytes(raw[:keep])
    with pytest.raises(ConfigError, match=SINGLE):
        load(saved)


@pytest.mark.parametrize(
    "header",
    [
        [],
        3,
        {"a": 3},
        {"a": {}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}},
        {"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}},
    ],
)
def test_a_damaged_header_is_refused(header: Any, saved: Path) -> None:
    raw = json.dumps(header).encode()
    (saved / SINGLE).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(64))
    with pytest.raises(ConfigError, match=f"{SINGLE}: no whole safetensors file"):
        load(saved)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_damaged_index_is_refused(text: str, saved: Path) -> None:
    (saved / INDEX).write_text(text)
    with pytest.raises(ConfigError):
        load(saved)


@pytest.mark.parametrize("content", [[1], {"a": 1}, 3])
def test_a_pickle_of_something_else_is_refused(content: Any, saved: Path) -> None:
    (saved / SINGLE).unlink()
    torch.save(content, saved / PICKLED)
    with pytest.raises(ConfigError, match="no state dict of tensors"):
        load(saved)


def test_a_missing_shard_is_named(saved: Path, tmp_path: Path) -> None:
    cut = shard(saved, tmp_path / "cut", 3)
    (cut / "model-1.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"model-1\.safetensors"):
        load(cut)


def test_a_missing_tensor_is_named(saved: Path) -> None:
    tensors = load_file(saved / SINGLE)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, saved / SINGLE)
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.up_proj\.weight is missing"):
        load(saved)


def test_a_tensor_of_another_shape_is_named(saved: Path) -> None:
    tree = LLAMA.to_tree() | {"vocab_size": 99}
    (saved / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight is \(101, 48\), .* \(99, 48\)"):
        load(saved)


def test_a_quantised_tensor_is_refused_by_name(saved: Path) -> None:
    tensors = load_file(saved / SINGLE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, saved / SINGLE)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is I8"):
        load(saved)
