"""Drafters: whatever proposes tokens.

Knows how to make the one that a configuration names. Does not know where it runs, or who judges its proposals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from distspec import models
from distspec.config import Config
from distspec.constraints import Grammars
from distspec.drafters.base import Called, Drafter, DraftRow, Proposal, never
from distspec.drafters.dflash import DflashDrafter
from distspec.drafters.eagle import EagleDrafter
from distspec.drafters.guided import Guided
from distspec.drafters.ngram import NgramDrafter
from distspec.drafters.standalone import StandaloneDrafter
from distspec.drafters.suffix import SuffixDrafter
from distspec.engine import Engine
from distspec.engine.acceptance import ACCEPTANCES, Acceptance
from distspec.engine.synthetic import SyntheticGuesser
from distspec.errors import InvalidValue
from distspec.models.dflash import Dflash
from distspec.models.draft_checkpoint import DraftModel
from distspec.models.llama import Llama

__all__ = [
    "DRAFTERS",
    "GUESSERS",
    "DflashDrafter",
    "DraftRow",
    "Drafter",
    "EagleDrafter",
    "Guided",
    "NgramDrafter",
    "Proposal",
    "StandaloneDrafter",
    "SuffixDrafter",
    "draft_model",
    "make",
]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What drafters are made from; see `make`."""

    config: Config
    model: Llama | DraftModel | None
    max_model_len: int
    device: torch.device
    grammars: Grammars | None
    is_called: Called

    @property
    def acceptance(self) -> Acceptance:
        return ACCEPTANCES[self.config.speculation.acceptance]


def draft_model(config: Config, *, device: torch.device, target: Llama | None = None) -> Llama | DraftModel | None:
    """The model that the drafter computes with which config.speculation.drafter names; None if it has none.

    target: the model itself where it is loaded on this device, to be shared by draft models that borrow its embeddings
    and head; else these are loaded. Raises ConfigError for a draft model that does not fit the target, ModelNotFound.
    """
    kind = config.speculation.drafter
    if DRAFTERS[kind] not in (_standalone, _featured):
        return None
    name, folder = _draft_model(config), models.model_folder(config.model.name)
    dtype = getattr(torch, config.model.dtype)
    if kind == "standalone":
        models.same_vocabulary(folder, models.model_folder(name, models.DRAFT_FIELD))
        vocab_size = models.ModelConfig.from_pretrained(folder).vocab_size  # what a client may say has no other bound
        return models.widened(models.load_model(name, dtype=dtype, device=device, field=models.DRAFT_FIELD), vocab_size)
    parts = models.Target.of(target) if target is not None else models.load_target(folder, dtype=dtype, device=device)
    return models.load_draft(kind, models.model_folder(name, models.DRAFT_FIELD), parts)


def make(
    config: Config,
    model: Llama | DraftModel | None,
    *,
    max_model_len: int,
    device: torch.device,
    grammars: Grammars | None = None,
    is_called: Called = never,
) -> Drafter | None:
    """The drafter that config.speculation.drafter names, None for `none`.

    model: what `draft_model` loads, which several may share. max_model_len: of the target. device: of drafters that
    compute. grammars: of the tokenizer, for drafts that keep to constraints. is_called: of those that grow their trees
    forward by forward, see Drafter.propose. Where acceptance is synthetic, those of GUESSERS make their guesses up.
    Raises ConfigError.
    """
    drafter = DRAFTERS[config.speculation.drafter](_Plan(config, model, max_model_len, device, grammars, is_called))
    return Guided(drafter, grammars) if drafter is not None and grammars is not None else drafter


def _ngram(plan: _Plan) -> Drafter:
    return NgramDrafter(plan.config.speculation.ngram, max_model_len=plan.max_model_len, device=plan.device)


def _suffix(plan: _Plan) -> Drafter:
    return SuffixDrafter(plan.config.speculation.suffix, max_model_len=plan.max_model_len)


def _standalone(plan: _Plan) -> Drafter:
    config, model = plan.config, plan.model
    assert isinstance(model, Llama)
    longest = min(plan.max_model_len, model.config.max_position)
    made_up = config.speculation.synthetic_acceptance
    kind = Engine if made_up is None else partial(SyntheticGuesser, odds=made_up)
    return StandaloneDrafter(
        kind(
            model,
            config.engine,
            device=plan.device,
            max_model_len=longest,
            acceptance=plan.acceptance,
            grammars=plan.grammars,
        ),
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_scratch_nodes=config.engine.max_scratch_nodes,
        max_model_len=plan.max_model_len,
        is_called=plan.is_called,
    )


def _featured(plan: _Plan) -> Drafter:
    model = plan.model
    assert model is not None
    assert not isinstance(model, Llama)
    if isinstance(model, Dflash):
        rows, room = model.settings.block_size, plan.config.engine.max_scratch_nodes
        if rows > room:
            raise InvalidValue("engine.max_scratch_nodes", room, f">= {rows}, the rows of the draft model's block")
    kind = partial(DflashDrafter, model) if isinstance(model, Dflash) else partial(EagleDrafter, model)
    return kind(
        plan.config.engine,
        max_model_len=plan.max_model_len,
        device=plan.device,
        acceptance=plan.acceptance,
        grammars=plan.grammars,
        is_called=plan.is_called,
    )


def _draft_model(config: Config) -> str:
    name = config.speculation.draft_model
    assert name is not None  # config.check
    return name


DRAFTERS: dict[str, Callable[[_Plan], Drafter | None]] = {
    "none": lambda plan: None,
    "ngram": _ngram,
    "suffix": _suffix,
    "standalone": _standalone,
    "eagle": _featured,
    "eagle3": _featured,
    "mtp": _featured,
    "dflash": _featured,
}

GUESSERS = frozenset({"standalone"})
"""What makes its own guesses up, where acceptance is synthetic; the others are wrapped, see drafters.synthetic."""
