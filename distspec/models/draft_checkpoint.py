"""Folders of draft models: what their config.json and tensors are called, in each layout they are published in.

Knows the layouts of SafeAILab/EAGLE, z-lab/dflash and DeepSeek (each kind's own) and of vllm-project/speculators, and
what of a draft model must agree with its target. Does not know what the models compute, or drafters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from distspec.errors import InvalidValue
from distspec.models.checkpoint import Checkpoint, digest_of, load_folder, write_files
from distspec.models.config import DRAFT_FIELD, ModelConfig, read_tree
from distspec.models.dflash import Dflash, DflashConfig
from distspec.models.draft import Target
from distspec.models.eagle import Eagle, EagleConfig
from distspec.models.eagle3 import Eagle3, Eagle3Config
from distspec.models.fields import Fields
from distspec.models.llama import Head, parameters, random_weights
from distspec.models.mtp import Mtp, MtpConfig
from distspec.models.shapes import weights_seed

DraftConfig = EagleConfig | Eagle3Config | MtpConfig | DflashConfig
DraftModel = Eagle | Eagle3 | Mtp | Dflash
Layout = Literal["own", "speculators"]

_SPECULATORS = "speculators_model_type"
_LAYER = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_HEAD = "draft_vocab_size"
_RENAMED: dict[tuple[str, Layout], dict[str, str]] = {
    ("eagle", "speculators"): {"fc.": "fusion_fc.", "layers.0.": "transformer."},
    ("eagle3", "own"): {"layers.0.": "midlayer."},
}
"""Beginnings of tensor names that a layout has otherwise than the models' tables."""
_IGNORED = ("rotary_emb.inv_freq", "embed_tokens.weight", "shared_head.head.weight")
"""Ends of names of tensors that repeat what the configuration says, or what the target has."""


def load_draft(kind: str, folder: str | Path, target: Target) -> DraftModel:
    """The draft model in a folder, on the target's device and in its dtype. kind: eagle, eagle3, mtp or dflash.

    Raises ConfigError that names speculation.draft_model for a folder that cannot be used or does not fit the target,
    ModelNotFound.
    """
    checkpoint = Checkpoint(folder, DRAFT_FIELD)
    settings, layout = _read(kind, checkpoint, target.config)
    _refuse_further(kind, layout, checkpoint, settings)
    dtype, device = target.embedding.dtype, target.embedding.device
    weights = {
        name: checkpoint.parameter({_renamed(kind, layout, part): parts[part] for part in parts}, dtype, device)
        for name, parts in settings.parameters().items()
    }
    if isinstance(settings, Eagle3Config | DflashConfig) and settings.reduced:
        assert settings.draft_vocab_size is not None
        weights["ids"] = _ids(checkpoint, settings.draft_vocab_size, target.config.vocab_size).to(device)
    return settings.make(weights, target)


def read_draft(kind: str, folder: str | Path, target: ModelConfig) -> DraftConfig:
    """What a folder says of its draft model, without its weights. Raises as load_draft."""
    return _read(kind, Checkpoint(folder, DRAFT_FIELD), target)[0]


def load_target(folder: str | Path, *, dtype: torch.dtype, device: torch.device) -> Target:
    """The parts that draft models borrow, of a target that is not loaded here. Raises as models.load_model."""
    if weights_seed(folder) is not None:
        return Target.of(load_folder(folder, dtype=dtype, device=device))  # drawn in one order, so all of them
    config, checkpoint = ModelConfig.from_pretrained(folder), Checkpoint(folder)
    table = {name: parts for name, parts in parameters(config).items() if name in ("embedding", "norm", "head")}
    own = {name: checkpoint.parameter(parts, dtype, device) for name, parts in table.items()}
    return Target(config, own["embedding"], own["norm"], Head(own.get("head", own["embedding"])))


def random_draft(settings: DraftConfig, target: Target, *, seed: int) -> DraftModel:
    """A draft model with random weights, a function of settings and seed alone."""
    device = target.embedding.device
    weights = random_weights(settings.parameters(), seed=seed, dtype=target.embedding.dtype, device=device)
    if isinstance(settings, Eagle3Config | DflashConfig) and settings.reduced:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(settings.layer.vocab_size, generator=generator)[: settings.draft_vocab_size]
        weights["ids"] = chosen.sort().values.to(device)
    return settings.make(weights, target)


def save_draft(model: DraftModel, folder: str | Path, layout: Layout = "own") -> None:
    """Write a folder as the given layout publishes it. mtp has its own only."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parts in model.settings.parameters().items():
        rows = [shape[0] for shape in parts.values()]
        pieces = torch.split(model.weights[name], rows)
        tensors |= zip((_renamed(model.settings.kind, layout, part) for part in parts), pieces, strict=True)
    if "ids" in model.weights:
        ids = model.weights["ids"]
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        known = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=ids.device)
        tensors["t2d"] = known.index_fill_(0, ids, True)
    write_files(folder, _tree(model.settings, layout), tensors)


def draft_fingerprint(folder: str | Path) -> str:
    """As models.fingerprint, of a draft model's folder."""
    return digest_of(json.dumps(read_tree(folder, DRAFT_FIELD), sort_keys=True), folder, DRAFT_FIELD)


# -- config.json, in --------------------------------------------------------------------------------


def _read(kind: str, checkpoint: Checkpoint, target: ModelConfig) -> tuple[DraftConfig, Layout]:
    tree = read_tree(checkpoint.folder, DRAFT_FIELD)
    found = tree.get(_SPECULATORS, kind)
    if found != kind:
        raise InvalidValue(DRAFT_FIELD, f"kind {found}", f"speculation.drafter to be {found} for {checkpoint.folder}")
    reading = _Reading(kind, tree, checkpoint, target)
    return _READERS[kind](reading), reading.layout


class _Reading:
    """A folder that is being read, and the target it must fit."""

    def __init__(self, kind: str, tree: Mapping[str, Any], checkpoint: Checkpoint, target: ModelConfig) -> None:
        self.fields = Fields(tree, f"{checkpoint.folder}/config.json", DRAFT_FIELD)
        self.target = target
        self.folder = checkpoint.folder
        self.layout: Layout = "speculators" if _SPECULATORS in tree else "own"
        self._kind = kind
        self._checkpoint = checkpoint

    @property
    def layer_fields(self) -> Fields:
        """Where its layers are described."""
        return self.fields.part(_LAYER) if _LAYER in self.fields.tree else self.fields

    def holds(self, name: str) -> bool:
        """There is a tensor, by the name that the models' tables have for it."""
        return _renamed(self._kind, self.layout, name) in self._checkpoint.tensors

    def as_stored(self, layer: ModelConfig) -> ModelConfig:
        """The layer, of the family that its tensors say: a config.json often repeats the target's."""
        tensors = ("q_norm.weight", "q_proj.bias", "o_proj.bias")
        normed, biased, whole = (self.holds(f"layers.0.self_attn.{name}") for name in tensors)
        family = "qwen3" if normed else "qwen2" if biased and not whole else "llama"
        return replace(layer, model_type=family, attention_bias=biased)

    def layer(self, layers: int = 1) -> ModelConfig:
        """Shape of its layers, and as many positions as the target has: its weights say nothing of positions.
        layers: how many there must be."""
        fields = self.layer_fields
        found = ModelConfig.from_tree(fields.tree, fields.where, field=DRAFT_FIELD)
        self.must("vocab_size", found.vocab_size, self.target.vocab_size)
        if self._kind != "mtp":
            self.must("kv_lora_rank", found.latent and found.latent.rank, None, f"the published layout of {self._kind}")
        self.must("num_hidden_layers", found.num_layers, layers, "the layers that drafters can run")
        return replace(found, max_position=self.target.max_position)

    def stored_layers(self) -> int:
        """How many layers there are tensors of."""
        numbers = (re.match(r"layers\.(\d+)\.", name) for name in self._checkpoint.tensors)
        return max((int(number[1]) + 1 for number in numbers if number), default=0)

    def must(self, what: str, got: object, need: object, whose: str = "the target's") -> None:
        if got != need:
            raise InvalidValue(DRAFT_FIELD, f"{what} {got}", f"{what} {need}, {whose}; in {self.folder}")

    def taps(self, fields: Fields, name: str, default: Sequence[int] | None = None, offset: int = 0) -> tuple[int, ...]:
        """Taps of the target that it names; offset: what a tap is above the number that stands there."""
        taps, last = tuple(tap + offset for tap in fields.integers(name, default)), self.target.num_layers
        if not taps or not all(0 <= tap <= last for tap in taps):
            need = f"layers of the target, 0 to {last}; in {self.folder}"
            raise InvalidValue(DRAFT_FIELD, f"target layers {list(taps)}", need)
        return taps


def _eagle(reading: _Reading) -> EagleConfig:
    reading.must("layernorms", reading.fields.flag("layernorms"), False, "the published EAGLE")
    layer = reading.layer()
    reading.must("hidden_size", layer.hidden_size, reading.target.hidden_size)
    layer, taps = reading.as_stored(layer), (reading.target.num_layers,)
    return EagleConfig(layer, taps, fusion_bias=reading.holds("fc.bias"))


def _eagle3(reading: _Reading) -> Eagle3Config:
    fields, layers = reading.fields, reading.target.num_layers
    reading.must("fc_norm", fields.flag("fc_norm"), False, "which is all that is supported")
    layer = reading.layer()
    width = fields.count("target_hidden_size", layer.hidden_size)
    own_embedding = reading.holds("embed_tokens.weight")
    reading.must("hidden_size", width, reading.target.hidden_size)
    if not own_embedding:
        reading.must("hidden_size", layer.hidden_size, width, "the target's, without embed_tokens.weight of its own")
    named = fields if _TAPS in fields.tree else fields.part("eagle_config")
    return Eagle3Config(
        layer=reading.as_stored(layer),
        taps=reading.taps(named, _TAPS, (2, layers // 2, layers - 3)),
        target_hidden_size=width,
        draft_vocab_size=fields.count(_HEAD, layer.vocab_size, most=layer.vocab_size),
        own_embedding=own_embedding,
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fields.flag("norm_before_fc"),
        norm_output=fields.flag("norm_output"),
    )


def _mtp(reading: _Reading) -> MtpConfig:
    """Its config.json is that of the target it belongs to, with num_nextn_predict_layers beside."""
    layer = reading.layer(layers=reading.target.num_layers)
    further = reading.fields.count("num_nextn_predict_layers", 0, least=0)
    reading.must("num_nextn_predict_layers", further, 1, "one layer that feeds itself")
    reading.must("hidden_size", layer.hidden_size, reading.target.hidden_size)
    return MtpConfig(replace(layer, num_layers=1), reading.target.num_layers)


def _dflash(reading: _Reading) -> DflashConfig:
    fields = reading.fields
    layer = reading.layer(reading.stored_layers())
    kinds = reading.layer_fields.tree.get("layer_types") or []
    others = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else kinds
    reading.must("layer_types", others, [], "full attention only")
    reading.must("hidden_size", layer.hidden_size, reading.target.hidden_size)
    own = fields if reading.layout == "speculators" else fields.part("dflash_config")
    if reading.layout == "speculators":
        reading.must("sample_from_anchor", fields.flag("sample_from_anchor"), False, "as published")
        taps = reading.taps(own, "aux_hidden_state_layer_ids")
        head = fields.count(_HEAD, most=layer.vocab_size) if reading.holds("lm_head.weight") else None
    else:
        # A layer's number there means what leaves the layer; a tap is what enters one.
        taps, head = reading.taps(own, "target_layer_ids", offset=1), None
    return DflashConfig(
        layer=layer,
        taps=taps,
        block_size=(fields if fields.tree.get("block_size") else own).count("block_size", least=2),
        mask_token=own.count("mask_token_id", least=0, most=layer.vocab_size - 1),
        draft_vocab_size=head,
        own_embedding=reading.holds("embed_tokens.weight"),
    )


_READERS: dict[str, Callable[[_Reading], DraftConfig]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "mtp": _mtp,
    "dflash": _dflash,
}


# -- config.json, out; tensors ----------------------------------------------------------------------


def _tree(settings: DraftConfig, layout: Layout) -> dict[str, Any]:
    if isinstance(settings, MtpConfig):
        tree = replace(settings.layer, num_layers=settings.index + 1).to_tree()  # all of them without experts
        return {**tree, "num_hidden_layers": settings.index, "num_nextn_predict_layers": 1}
    layer = settings.layer.to_tree()
    if layout == "speculators":
        return {_SPECULATORS: settings.kind, "transformer_layer_config": layer, **_speculators(settings)}
    if isinstance(settings, DflashConfig):
        own = {"target_layer_ids": [tap - 1 for tap in settings.taps], "mask_token_id": settings.mask_token}
        return {**layer, "block_size": settings.block_size, "dflash_config": own}
    if isinstance(settings, Eagle3Config):
        ids = {"eagle_aux_hidden_state_layer_ids": list(settings.taps)}
        sizes = {"draft_vocab_size": settings.draft_vocab_size, "target_hidden_size": settings.target_hidden_size}
        return {**layer, **sizes, "eagle_config": ids}
    return {**layer, "bias": settings.fusion_bias}


def _speculators(settings: EagleConfig | Eagle3Config | DflashConfig) -> dict[str, Any]:
    if isinstance(settings, EagleConfig):
        return {"layernorms": False, "fusion_bias": settings.fusion_bias}
    size = settings.draft_vocab_size or settings.layer.vocab_size
    if isinstance(settings, DflashConfig):
        block = {"block_size": settings.block_size, "mask_token_id": settings.mask_token}
        return {"draft_vocab_size": size, "aux_hidden_state_layer_ids": list(settings.taps), **block}
    return {
        "draft_vocab_size": size,
        "target_hidden_size": settings.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(settings.taps),
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": settings.norm_before_fc,
        "norm_output": settings.norm_output,
    }


def _renamed(kind: str, layout: Layout, name: str) -> str:
    """A tensor by the name that the layout has for it."""
    for ours, theirs in _RENAMED.get((kind, layout), {}).items():
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name


def _refuse_further(kind: str, layout: Layout, checkpoint: Checkpoint, settings: DraftConfig) -> None:
    """Refuse tensors beside used ones, in a layer or of a matrix: a variant that would be computed wrongly."""
    used = {_renamed(kind, layout, part) for parts in settings.parameters().values() for part in parts}
    matrices = {name.rpartition(".")[0] for name in used}
    rooms = {matrix.rpartition(".")[0] for matrix in matrices} - {""}
    for name in checkpoint.tensors.keys() - used:
        matrix = name.rpartition(".")[0]
        is_beside = matrix in matrices or matrix.rpartition(".")[0] in rooms
        if is_beside and not name.endswith(_IGNORED):
            raise InvalidValue(
                DRAFT_FIELD, f"tensor {name}", f"only what {kind} is published with; in {checkpoint.folder}"
            )


def _ids(checkpoint: Checkpoint, count: int, vocab_size: int) -> Tensor:
    """int64 [count]: the target's id of each of the draft model's tokens, from `d2t`, the differences between them."""
    offsets = checkpoint.parameter({"d2t": (count,)}, torch.int64, torch.device("cpu"))
    ids = offsets + torch.arange(count)
    if ids.min() < 0 or ids.max() >= vocab_size or len(set(ids.tolist())) < count:
        need = f"{count} different ids below the target's {vocab_size}; in {checkpoint.folder}"
        raise InvalidValue(DRAFT_FIELD, "d2t", need)
    if "t2d" in checkpoint.tensors:
        known = checkpoint.parameter({"t2d": (vocab_size,)}, torch.bool, torch.device("cpu"))
        if not torch.equal(known.nonzero()[:, 0], ids.sort().values):
            raise InvalidValue(DRAFT_FIELD, "t2d", f"the ids that d2t names; in {checkpoint.folder}")
    return ids
