"""From a model's name to its folder, weights and tokenizer.

Knows the kinds of name: the default model, `random:SHAPE`, a local folder, a hub id. Does not know what is inside a
folder beyond which files to ask the hub for.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from distspec.errors import ModelNotFound
from distspec.models import smollm2
from distspec.models.checkpoint import PICKLED, load_folder, weight_files
from distspec.models.config import FIELD
from distspec.models.llama import Llama
from distspec.models.shapes import PREFIX, shape_folder, weights_seed
from distspec.models.tokenizer import load_tokenizer_folder

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.jinja", "model*.safetensors"]
_HUB_PICKLED = ["*.json", PICKLED]


def model_folder(name: str, field: str = FIELD) -> Path:
    """The local folder of a model: `smollm2-135m`, `random:SHAPE`, a folder, or a hub id; fetched first where need be.
    field: what names the model in the configuration.

    A hub model that is already in the hub's cache is used without asking the network.
    Raises ModelNotFound that says where was looked, ConfigError for a folder that cannot be used.
    """
    if name == smollm2.NAME:
        return smollm2.folder()
    if name.startswith(PREFIX):
        return shape_folder(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(name, [str(folder / "config.json")])
        if weights_seed(folder, field) is None:
            weight_files(folder, field)
        return folder
    looked = [f"the default model ({smollm2.NAME})", f"folder {folder.absolute()}"]
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFound(name, [*looked, "not a hub id (owner/name)"])
    return _hub_folder(name, looked, field)


def load_model(name: str, *, dtype: torch.dtype, device: torch.device, field: str = FIELD) -> Llama:
    """The model of that name, every parameter straight on its device and in its dtype. field: as of model_folder.

    On a CPU and in the dtype that is stored, weights are views of the mapped files where these lie in order.
    Raises ModelNotFound, or ConfigError for an architecture or a file that cannot be used.
    """
    return load_folder(model_folder(name, field), dtype=dtype, device=device, field=field)


def load_tokenizer(name: str) -> Any:
    """The transformers PreTrainedTokenizerFast of that model. Raises ModelNotFound."""
    return load_tokenizer_folder(model_folder(name))


def _hub_folder(name: str, looked: list[str], field: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    # The pickled file is asked for only where there is no other, so that nobody downloads the same weights twice.
    for offline, files in ((True, _HUB_FILES), (False, _HUB_FILES), (False, _HUB_PICKLED)):
        try:
            folder = Path(snapshot_download(name, allow_patterns=files, local_files_only=offline))
            weight_files(folder, field)
        except (OSError, ValueError, ModelNotFound) as error:
            place = f"hub cache {constants.HF_HUB_CACHE}" if offline else f"hub {constants.ENDPOINT}"
            looked.append(f"{place}: {' '.join(str(error).split())[:400]}")
        else:
            return folder
    raise ModelNotFound(name, looked)
