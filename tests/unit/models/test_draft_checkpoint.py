"""Draft models come back from every layout they are published in, and what does not fit their target is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distspec.errors import ConfigError, InvalidValue, ModelNotFound
from distspec.models import load_model, random_model, save_pretrained
from distspec.models.draft import DraftHead, Target
from distspec.models.draft_checkpoint import (
    DraftModel,
    Layout,
    draft_fingerprint,
    load_draft,
    load_target,
    random_draft,
    save_draft,
)
from distspec.models.mtp import MtpConfig
from distspec.models.shapes import KEY
from tests.featured import ALL, BLOCKS, BLOCKS_SPECULATORS, CPU, FED, SHAPE, SPECULATORS_ONLY, made, target
from tests.shapes import LATENT

OWN: list[tuple[str, Layout]] = [(name, "own") for name in (FED | BLOCKS)]
SPECULATORS: list[tuple[str, Layout]] = [(name, "speculators") for name in ALL if ALL[name].kind != "mtp"]


def load(name: str, folder: Path) -> DraftModel:
    return load_draft(ALL[name].kind, folder, Target.of(target()))


def same(one: DraftModel, other: DraftModel) -> bool:
    assert one.weights.keys() == other.weights.keys()
    return one.settings == other.settings and all(torch.equal(w, other.weights[n]) for n, w in one.weights.items())


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("name", "layout"), OWN + SPECULATORS)
def test_loaded_is_what_was_saved(name: str, layout: Layout, tmp_path: Path) -> None:
    save_draft(made(name), tmp_path, layout)
    assert same(load(name, tmp_path), made(name))


@pytest.mark.parametrize(
    ("name", "layout", "names"),
    [
        ("eagle, bias", "own", {"fc.bias", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"}),
        ("eagle, bias", "speculators", {"fusion_fc.bias", "transformer.self_attn.q_proj.weight"}),
        (
            "eagle3",
            "own",
            {"midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "d2t", "t2d", "norm.weight"},
        ),
        ("eagle3", "speculators", {"layers.0.hidden_norm.weight", "lm_head.weight", "d2t", "t2d"}),
        ("mtp", "own", {f"model.layers.3.{x}.weight" for x in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}),
        ("dflash", "own", {"layers.1.self_attn.k_norm.weight", "hidden_norm.weight", "fc.weight"}),
    ],
)
def test_tensors_have_the_published_names(name: str, layout: Layout, names: set[str], tmp_path: Path) -> None:
    save_draft(made(name), tmp_path, layout)
    found = load_file(tmp_path / "model.safetensors").keys()
    assert names <= found
    assert "layers.0.input_layernorm.weight" not in found or ALL[name].kind != "eagle"


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_pickled_folder_with_an_embedding_that_nobody_needs_is_the_same(name: str, tmp_path: Path) -> None:
    """As EAGLE's authors publish: pytorch_model.bin, and the target's embeddings beside the layer."""
    save_draft(made(name), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    if name == "eagle":
        tensors["embed_tokens.weight"] = target().embedding
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same(load(name, tmp_path), made(name))


@pytest.mark.parametrize("name", ["eagle", "eagle, bias", "eagle, bias of queries", "eagle3, normed residual"])
def test_the_tensors_say_of_which_family_a_layer_is(name: str, tmp_path: Path) -> None:
    save_draft(made(name), tmp_path, "speculators")
    tree = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    for family in ("llama", "qwen2", "qwen3"):
        edit(tmp_path, transformer_layer_config={**tree, "model_type": family, "attention_bias": False})
        assert same(load(name, tmp_path), made(name))


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    save_draft(made("eagle"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"speculation\.draft_model.*pytorch_model"):
        load("eagle", tmp_path)


def test_eagle3_reads_a_low_a_middle_and_a_high_layer_unless_told(tmp_path: Path) -> None:
    deep = random_model(replace(SHAPE, num_layers=8), seed=0, dtype=torch.float32, device=CPU)
    save_draft(made("eagle3"), tmp_path)
    edit(tmp_path, eagle_config={})
    assert load_draft("eagle3", tmp_path, Target.of(deep)).taps == (2, 4, 5)
    edit(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 3, 8])
    assert load_draft("eagle3", tmp_path, Target.of(deep)).taps == (1, 3, 8)


def test_a_layer_number_of_dflash_means_what_leaves_the_layer(tmp_path: Path) -> None:
    save_draft(made("dflash"), tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    assert made("dflash").taps == (1, 2)
    assert tree["dflash_config"]["target_layer_ids"] == [0, 1]


def test_d2t_says_how_far_the_targets_id_is_off(tmp_path: Path) -> None:
    save_draft(made("eagle3"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ids = [i + int(offset) for i, offset in enumerate(tensors["d2t"])]
    assert ids == tensors["t2d"].nonzero()[:, 0].tolist()
    hidden = torch.randn(2, SHAPE.hidden_size)
    logits = DraftHead(tensors["lm_head.weight"], torch.tensor(ids), SHAPE.vocab_size)(hidden)
    assert logits.isfinite().all(0).nonzero()[:, 0].tolist() == ids
    torch.testing.assert_close(logits[:, ids[4]], hidden @ tensors["lm_head.weight"][4])


@pytest.mark.parametrize("offset", [-10, 1000])
def test_a_d2t_that_leaves_the_vocabulary_is_refused(offset: int, tmp_path: Path) -> None:
    save_draft(made("eagle3"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["d2t"][0] = offset
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidValue, match=r"speculation\.draft_model.*d2t"):
        load("eagle3", tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("eagle", {"vocab_size": 24}, "vocab_size 24.*vocab_size 23, the target's"),
        ("eagle", {"hidden_size": 40}, "hidden_size 40.*hidden_size 48, the target's"),
        ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ("eagle3", {"target_hidden_size": 40}, "hidden_size 40.*hidden_size 48, the target's"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, r"layers \[1, 2, 4\].*0 to 3"),
        ("eagle3", {"fc_norm": True}, "fc_norm"),
        ("eagle3", {"draft_vocab_size": 8}, "config.json says"),
        ("mtp", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2"),
        ("mtp", {"num_hidden_layers": 4}, "num_hidden_layers 4.*num_hidden_layers 3"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("eagle3", {"draft_vocab_size": 24}, "draft_vocab_size is '24', need an integer, 1 to 23"),
        ("dflash", {"block_size": None}, "block_size"),
        ("dflash", {"block_size": 1}, "block_size is '1', need an integer, 2 or more"),
        ("dflash", {"num_hidden_layers": 1}, "num_hidden_layers 1.*num_hidden_layers 2"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 23}}, "mask_token_id.*0 to 22"),
        ("dflash", {"model_type": "gpt2"}, "gpt2"),
    ],
)
def test_what_does_not_fit_is_named(name: str, changes: dict[str, object], what: str, tmp_path: Path) -> None:
    save_draft(made(name), tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"speculation.draft_model: .*{what}"):
        load(name, tmp_path)


def keys(tree: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return [
        path
        for key, value in tree.items()
        for path in [(*above, key), *(keys(value, (*above, key)) if isinstance(value, dict) else [])]
    ]


NONSENSE = [None, "x", -1, 0, 1.5, True, [], {}, [1], ["a"], [None], [[]], 10**9, {"a": 1}, float("nan")]


@pytest.mark.parametrize(("name", "layout"), OWN + SPECULATORS)
def test_a_key_that_is_missing_or_nonsense_is_an_error_or_makes_no_difference(
    name: str, layout: Layout, tmp_path: Path
) -> None:
    """Whatever a config.json says: a typed error that names what is to be changed, or a model that can be run."""
    save_draft(made(name), tmp_path, layout)
    path = tmp_path / "config.json"
    text, blamed = path.read_text(), set[str]()
    for *above, key in keys(json.loads(text)):
        for value in NONSENSE:
            tree = part = json.loads(text)
            for step in above:
                part = part[step]
            del part[key]
            if value is not None:
                part[key] = value
            path.write_text(json.dumps(tree))
            try:
                settings = load(name, tmp_path).settings
            except ConfigError as error:
                blamed.add(error.path)
            else:
                sizes = [getattr(settings, size, 2) for size in ("block_size", "mask_token", "draft_vocab_size")]
                assert all(size is None or type(size) is int for size in sizes), (key, value)
    assert blamed == {"speculation.draft_model"}


@pytest.mark.parametrize(("name", "layout"), OWN + SPECULATORS)
def test_a_tensor_that_is_missing_misshapen_or_not_used_is_named(name: str, layout: Layout, tmp_path: Path) -> None:
    save_draft(made(name), tmp_path, layout)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    needed = [tensor for tensor in tensors if tensor not in ("t2d", "embed_tokens.weight") and "bias" not in tensor]
    for tensor in needed:
        if "q_norm" in tensor or "lm_head" in tensor:
            continue  # says which variant it is
        save_file({key: value for key, value in tensors.items() if key != tensor}, path)
        with pytest.raises(ConfigError, match=rf"speculation\.draft_model: .*{re.escape(tensor)} is missing"):
            load(name, tmp_path)
    for tensor in needed:
        save_file(tensors | {tensor: torch.cat((tensors[tensor], tensors[tensor][:1]))}, path)
        with pytest.raises(ConfigError, match=rf"speculation\.draft_model: .*{re.escape(tensor)} is \("):
            load(name, tmp_path)
    [layer] = {tensor.rpartition("mlp.up_proj")[0] for tensor in tensors if "up_proj" in tensor and ".1." not in tensor}
    for surplus in ("fc.beta", f"{layer}mlp.up_proj.bias", f"{layer}self_attn.sinks", f"{layer}gate.weight"):
        beside = surplus.replace("fc.", next(t for t in tensors if t.endswith(("fc.weight", "eh_proj.weight")))[:-6])
        save_file(tensors | {beside: torch.zeros(3)}, path)
        with pytest.raises(InvalidValue, match=rf"speculation\.draft_model: .*{re.escape(beside)}"):
            load(name, tmp_path)
    repeated = {f"{layer}self_attn.rotary_emb.inv_freq": torch.zeros(3), f"{layer}embed_tokens.weight": torch.zeros(3)}
    save_file(repeated | tensors, path)
    assert same(load(name, tmp_path), made(name))


@pytest.mark.parametrize("change", ["other", "short"])
def test_a_t2d_that_marks_other_tokens_than_d2t_names_is_refused(change: str, tmp_path: Path) -> None:
    save_draft(made("eagle3"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "other":
        tensors["t2d"] = tensors["t2d"].logical_not()
    else:
        tensors["t2d"] = tensors["t2d"][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"speculation\.draft_model.*t2d"):
        load("eagle3", tmp_path)


def test_a_draft_model_of_another_kind_or_without_weights_is_refused(tmp_path: Path) -> None:
    save_draft(made("eagle3"), tmp_path, "speculators")
    with pytest.raises(InvalidValue, match="kind eagle3"):
        load_draft("eagle", tmp_path, Target.of(target()))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound):
        load("eagle3", tmp_path)


def test_a_target_that_is_not_loaded_lends_the_same_parts(tmp_path: Path) -> None:
    for tied in (False, True):
        whole = random_model(replace(SHAPE, tie_embeddings=tied), seed=3, dtype=torch.float32, device=CPU)
        save_pretrained(whole, tmp_path)
        ours, theirs = load_target(tmp_path, dtype=torch.float32, device=CPU), Target.of(whole)
        assert ours.config == theirs.config
        pairs = ((ours.embedding, theirs.embedding), (ours.norm, theirs.norm), (ours.head.weight, theirs.head.weight))
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_target_whose_weights_are_drawn_lends_the_same_parts(tmp_path: Path) -> None:
    save_pretrained(target(), tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, KEY: 5}))
    whole = Target.of(load_model(str(tmp_path), dtype=torch.float32, device=CPU))
    ours = load_target(tmp_path, dtype=torch.float32, device=CPU)
    assert torch.equal(ours.embedding, whole.embedding)
    assert torch.equal(ours.norm, whole.norm)
    assert torch.equal(ours.head.weight, whole.head.weight)


def test_the_fingerprint_is_of_weights_and_settings(tmp_path: Path) -> None:
    found = set()
    for i, (name, seed) in enumerate([("eagle", 1), ("eagle", 2), ("eagle, bias", 1)]):
        save_draft(random_draft(ALL[name], Target.of(target()), seed=seed), tmp_path / str(i))
        found.add(draft_fingerprint(tmp_path / str(i)))
    save_draft(made("eagle"), tmp_path / "again")
    assert len(found) == 3
    assert draft_fingerprint(tmp_path / "again") in found


def test_unused_variants_would_be_noticed() -> None:
    """Every layout is tried with every kind it can express."""
    assert {ALL[name].kind for name, _ in OWN} == {"eagle", "eagle3", "mtp", "dflash"}
    assert {name for name, _ in SPECULATORS} >= SPECULATORS_ONLY.keys() | BLOCKS_SPECULATORS.keys()


LATENT_LAYER = replace(LATENT, num_layers=1, vocab_size=23, max_position=200, eos_token_ids=())


def test_a_layer_that_looks_one_token_ahead_may_keep_latents(tmp_path: Path) -> None:
    settings = MtpConfig(LATENT_LAYER, index=SHAPE.num_layers)
    one = random_draft(settings, Target.of(target()), seed=1)
    save_draft(one, tmp_path)
    assert same(load_draft("mtp", tmp_path, Target.of(target())), one)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash"])
def test_other_layers_may_not(name: str, tmp_path: Path) -> None:
    save_draft(made(name), tmp_path)
    edit(tmp_path, **replace(LATENT_LAYER, num_layers=made(name).config.num_layers).to_tree())
    with pytest.raises(InvalidValue, match=r"speculation\.draft_model.*kv_lora_rank 24.*None"):
        load(name, tmp_path)
