"""Drafters: whatever proposes tokens.

Knows how to make the one that a configuration names. Does not know where it runs, or who judges its proposals.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distspec import models
from distspec.config import Config
from distspec.drafters.base import Drafter, DraftRow, Proposal
from distspec.drafters.ngram import NgramDrafter
from distspec.drafters.standalone import StandaloneDrafter
from distspec.drafters.suffix import SuffixDrafter
from distspec.engine import Engine

__all__ = ["DRAFTERS", "DraftRow", "Drafter", "NgramDrafter", "Proposal", "StandaloneDrafter", "SuffixDrafter", "make"]


def make(config: Config, *, max_model_len: int, device: torch.device) -> Drafter | None:
    """The drafter that config.speculation.drafter names, None for `none`.

    max_model_len: of the target. device: of drafters that compute. Raises ConfigError for a draft
    model whose vocabulary is not the target's, ModelNotFound.
    """
    return DRAFTERS[config.speculation.drafter](config, max_model_len, device)


def _ngram(config: Config, max_model_len: int, device: torch.device) -> Drafter:
    return NgramDrafter(config.speculation.ngram, max_model_len=max_model_len, device=device)


def _suffix(config: Config, max_model_len: int, device: torch.device) -> Drafter:
    return SuffixDrafter(config.speculation.suffix, max_model_len=max_model_len)


def _standalone(config: Config, max_model_len: int, device: torch.device) -> Drafter:
    name = config.speculation.draft_model
    assert name is not None  # config.check
    models.same_vocabulary(models.model_folder(config.model.name), models.model_folder(name))
    model = models.load_model(name, dtype=getattr(torch, config.model.dtype), device=device)
    return StandaloneDrafter(
        Engine(model, config.engine, device=device, max_model_len=min(max_model_len, model.config.max_position)),
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_scratch_nodes=config.engine.max_scratch_nodes,
        max_model_len=max_model_len,
    )


DRAFTERS: dict[str, Callable[[Config, int, torch.device], Drafter | None]] = {
    "none": lambda config, max_model_len, device: None,
    "ngram": _ngram,
    "suffix": _suffix,
    "standalone": _standalone,
}
