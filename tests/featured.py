"""What tests of draft models that read the target's features share: tiny ones of every kind, and their target."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from distspec.models import Taps, random_model
from distspec.models.dflash import DflashConfig
from distspec.models.draft import Target
from distspec.models.draft_checkpoint import DraftConfig, DraftModel, random_draft, save_draft
from distspec.models.eagle import EagleConfig
from distspec.models.eagle3 import Eagle3Config
from distspec.models.llama import Llama
from distspec.models.mtp import MtpConfig
from tests import plain
from tests.causal import Causal
from tests.shapes import LLAMA

CPU = torch.device("cpu")
SHAPE = replace(LLAMA, vocab_size=23, max_position=200)
_LAYER = replace(SHAPE, num_layers=1, num_heads=4, intermediate_size=56, eos_token_ids=())
_QWEN = replace(_LAYER, model_type="qwen3", head_dim=16)

_EAGLE3 = Eagle3Config(layer=_LAYER, taps=(2, 1, 0), target_hidden_size=48, draft_vocab_size=23)
FED: dict[str, DraftConfig] = {
    "eagle": EagleConfig(_LAYER, (3,)),
    "eagle, bias": EagleConfig(replace(_LAYER, attention_bias=True), (3,), fusion_bias=True),
    "eagle, bias of queries": EagleConfig(replace(_LAYER, attention_bias=True, model_type="qwen2"), (3,)),
    "eagle3": replace(_EAGLE3, draft_vocab_size=9),
    "eagle3, whole vocabulary": _EAGLE3,
    "eagle3, narrow": replace(_EAGLE3, layer=replace(_LAYER, hidden_size=32), own_embedding=True, taps=(3, 1)),
    "mtp": MtpConfig(replace(_QWEN, attention_bias=False), index=3),
}
"""One layer fed with a feature per token."""

SPECULATORS_ONLY: dict[str, DraftConfig] = {
    "eagle3, normed residual": replace(_EAGLE3, layer=_QWEN, norm_before_residual=True, own_embedding=True),
    "eagle3, normed features": replace(_EAGLE3, norm_before_fc=True, norm_output=True),
}
"""Variants that only one layout can express."""

_DFLASH = DflashConfig(layer=replace(_QWEN, num_layers=2), taps=(1, 2), block_size=5, mask_token=22)
BLOCKS: dict[str, DraftConfig] = {"dflash": _DFLASH}
BLOCKS_SPECULATORS: dict[str, DraftConfig] = {
    "dflash, own head": replace(_DFLASH, draft_vocab_size=9, own_embedding=True)
}
ALL = FED | SPECULATORS_ONLY | BLOCKS | BLOCKS_SPECULATORS


@cache
def target() -> Llama:
    return random_model(SHAPE, seed=0, dtype=torch.float32, device=CPU)


@cache
def made(name: str, seed: int = 1) -> DraftModel:
    return random_draft(ALL[name], Target.of(target()), seed=seed)


@torch.inference_mode()
def features(tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    """As a DraftRow has them: [len(tokens), F], the row of a token being the target's features one position earlier,
    and zeros for the first."""
    found = Taps(taps)
    target().forward(torch.tensor(tokens), torch.arange(len(tokens)), Causal(), found)
    return torch.cat((torch.zeros_like(found.features()[:1]), found.features()[:-1]))


def outer() -> plain.Tensors:
    """What draft models borrow of the target."""
    return {"embedding": target().embedding, "norm": target().norm, "head": target().head.weight}


def published(name: str, folder: Path) -> tuple[str, dict[str, Any], plain.Tensors]:
    """Kind, config.json and tensors of a draft model as its own layout has them; variants that it cannot name as the
    other layout does."""
    model = made(name)
    save_draft(model, folder)
    tree, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    if name in SPECULATORS_ONLY:
        save_draft(model, folder / "other", "speculators")
        tree |= json.loads((folder / "other" / "config.json").read_text())
    return model.settings.kind, tree, tensors


def plain_fed(name: str, folder: Path) -> plain.Fed:
    """The dense model with the same weights, through files."""
    return plain.Fed(*published(name, folder), outer(), target().config.rms_eps)
