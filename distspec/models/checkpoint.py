"""Checkpoint folders: tensors in safetensors files, mapped into memory; config.json beside them. Draft models are often
published in one file of torch's own instead.

Knows the file format and how to get a model's parameters out of one or many files without a second copy. Does
not know where a folder came from, nor what a model computes.

The format (8 bytes of header length, a JSON header, raw tensors) is read here rather than by the safetensors
package, because a parameter of ours is often several tensors of the file. Where these lie one behind the
other, as in every folder that `save_pretrained` writes, the parameter is a view of the mapped file: loading
takes no time and no memory, and the workers of a host share one copy in the page cache.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distspec.errors import ConfigError, ModelNotFound
from distspec.models.config import FIELD, ModelConfig
from distspec.models.fields import Fields, read_object
from distspec.models.llama import Llama, parameters, random_model
from distspec.models.parts import Parts
from distspec.models.shapes import weights_seed

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,  # the last two for the vocabularies of draft models
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = "pytorch_model.bin"
_ALIGNMENT = 64
_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a mapped file: bytes begin .. end of `file`, a uint8 tensor over all of it."""

    file: Tensor
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self) -> Tensor:
        """The tensor, read-only by convention, without a copy unless the file is misaligned."""
        return _typed(self.file[self.begin : self.end], self.dtype).view(self.shape)


class Checkpoint:
    """The tensors of a folder, by name. field: what names the folder in the configuration.

    Raises ModelNotFound without weights, ConfigError for broken files.
    """

    def __init__(self, folder: str | Path, field: str = FIELD) -> None:
        self.folder = Path(folder)
        self.field = field
        self.tensors: dict[str, Stored] = {}
        for path in weight_files(self.folder, field):
            self.tensors |= _map(path, field)

    def parameter(self, parts: Parts, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The rows of `parts` one below the other. Raises ConfigError if one is missing or misshapen."""
        stored = [self._stored(name, shape) for name, shape in parts.items()]
        shape = (sum(part.shape[0] for part in stored), *stored[0].shape[1:])
        if device.type == "cpu" and all(part.dtype == dtype for part in stored) and _adjacent(stored):
            return _typed(stored[0].file[stored[0].begin : stored[-1].end], dtype).view(shape)
        whole = torch.empty(shape, dtype=dtype, device=device)
        for rows, part in zip(torch.split(whole, [part.shape[0] for part in stored]), stored, strict=True):
            rows.copy_(part.view())
        return whole

    def _stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        stored = self.tensors.get(name)
        if stored is None:
            raise ConfigError(self.field, f"{self.folder}: tensor {name} is missing")
        if stored.shape != shape:
            raise ConfigError(self.field, f"{self.folder}: tensor {name} is {stored.shape}, config.json says {shape}")
        return stored


def weight_files(folder: Path, field: str = FIELD) -> list[Path]:
    """The files with a folder's weights. field: as of Checkpoint. Raises ModelNotFound if there are none or one of them
    is absent, ConfigError for a broken index."""
    index = folder / INDEX
    if index.is_file():
        names = Fields(read_object(index, field), str(index), field).part("weight_map").tree.values()
        files = [folder / name for name in sorted({str(name) for name in names})]
    else:
        files = [folder / (PICKLED if (folder / PICKLED).is_file() and not (folder / SINGLE).is_file() else SINGLE)]
    absent = [str(path) for path in files if not path.is_file()]
    if absent:
        raise ModelNotFound(str(folder), absent)
    return files


def load_folder(folder: str | Path, *, dtype: torch.dtype, device: torch.device, field: str = FIELD) -> Llama:
    """The model in a folder, each parameter brought straight to its dtype and device, or drawn there. field: as of
    Checkpoint."""
    config = ModelConfig.from_pretrained(folder, field)
    seed = weights_seed(folder, field)
    if seed is not None:
        return random_model(config, seed=seed, dtype=dtype, device=device, drawn_on=device)
    checkpoint = Checkpoint(folder, field)
    weights = {name: checkpoint.parameter(parts, dtype, device) for name, parts in parameters(config).items()}
    return Llama(config, weights)


def save_pretrained(model: Llama, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a folder that this package and transformers both read; tokenizer: a transformers tokenizer."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parts in parameters(model.config).items():
        rows = [shape[0] for shape in parts.values()]
        tensors |= zip(parts, torch.split(model.weights[name], rows), strict=True)
    write_folder(folder, model.config, tensors)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_folder(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """config.json and model.safetensors, tensors in the order in which parameters are made of them."""
    order = [name for parts in parameters(config).values() for name in parts]
    write_files(folder, config.to_tree(), {name: tensors[name] for name in order})


def write_files(folder: Path, tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """config.json of a tree, and model.safetensors with tensors in the order given, the first of which says in which
    dtype the model is."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**tree, "dtype": dtype}, indent=2) + "\n")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with open(folder / SINGLE, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def fingerprint(folder: str | Path, field: str = FIELD) -> str:
    """16 hex digits that name the weights: the same on every host, whatever the files are called or cut into.

    Hashes the configuration, every tensor's name, dtype and shape, and a sample of its bytes, so that two
    fine-tunes of one model differ; reading it takes milliseconds. Of weights that are drawn, the seed. field: as of
    Checkpoint.
    """
    config, seed = ModelConfig.from_pretrained(folder, field), weights_seed(folder, field)
    if seed is not None:
        return hashlib.sha256(f"{config!r} {seed}".encode()).hexdigest()[:16]
    return digest_of(repr(config), folder, field)


def digest_of(config: str, folder: str | Path, field: str) -> str:
    """As `fingerprint`, of a folder whose configuration somebody else has read."""
    digest = hashlib.sha256(config.encode())
    for name, stored in sorted(Checkpoint(folder, field).tensors.items()):
        digest.update(f"{name} {NAMES[stored.dtype]} {stored.shape}".encode())
        middle = (stored.begin + stored.end) // 2
        for begin in (stored.begin, middle):
            sample = stored.file[begin : min(begin + _SAMPLE_BYTES, stored.end)]
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _map(path: Path, field: str) -> dict[str, Stored]:
    if path.name == PICKLED:
        return dict(_unpickled(path, field))
    size = path.stat().st_size
    try:
        return dict(_entries(path, size))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(field, f"{path}: no whole safetensors file: {error}") from None


def _unpickled(path: Path, field: str) -> Iterator[tuple[str, Stored]]:
    """Tensors of a state dict that torch.save wrote; nothing else is unpickled, so nothing in it is run."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever zip, pickle and torch raise
        raise ConfigError(field, f"{path}: no state dict of tensors: {str(error)[:200]}") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(field, f"{path}: no state dict of tensors")
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ConfigError(field, f"{path}: {name} is {tensor.dtype}, supported: {', '.join(map(str, NAMES))}")
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        yield name, Stored(raw, 0, raw.numel(), tensor.dtype, tuple(tensor.shape))


def _entries(path: Path, size: int) -> Iterator[tuple[str, Stored]]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} is {entry['dtype']}, supported: {', '.join(DTYPES)}")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if begin < 8 + length or end > size or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} lies outside the file or does not fill its shape")
        yield name, Stored(mapped, begin, end, dtype, shape)


def _adjacent(stored: list[Stored]) -> bool:
    return all(a.file is b.file and a.end == b.begin for a, b in itertools.pairwise(stored))


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; a view needs them aligned."""
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype)
