"""What keeps a worker out of a fleet: what would make it compute or draft otherwise, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from distspec.config import Ngram, Suffix, load
from distspec.models import Target, load_model, random_model, save_pretrained
from distspec.models.draft_checkpoint import random_draft, save_draft
from distspec.models.eagle import EagleConfig
from distspec.workers.fingerprint import fingerprint
from tests.shapes import LLAMA

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        save_pretrained(random_model(LLAMA, seed=seed, dtype=torch.float32, device=CPU), made / str(seed))
    return sorted(str(path) for path in made.iterdir())


def of(folders: list[str], **speculation: object) -> dict[str, str]:
    tree = {"model": {"name": folders[0]}, "speculation": {"placement": "local", **speculation}}
    return fingerprint(load(tree), CPU)


def test_a_draft_model_counts_only_where_it_drafts(folders: list[str]) -> None:
    assert of(folders, drafter="ngram", draft_model="/nowhere") == of(folders, drafter="ngram")
    alone = [of(folders, drafter="standalone", draft_model=folder) for folder in folders]
    assert alone[0]["drafter"] != alone[1]["drafter"]


def test_heads_that_draft_otherwise_differ(folders: list[str], tmp_path: Path) -> None:
    target = Target.of(load_model(folders[0], dtype=torch.float32, device=CPU))
    layer = replace(LLAMA, num_layers=1)
    for seed in (1, 2):
        save_draft(random_draft(EagleConfig(layer, (3,)), target, seed=seed), tmp_path / str(seed))
    found = [of(folders, drafter="eagle", draft_model=str(tmp_path / str(seed))) for seed in (1, 2)]
    assert [key for key in found[0] if found[0][key] != found[1][key]] == ["drafter"]


OTHERS: dict[str, list[Any]] = {
    "ngram": [{"max_n": 4}, {"min_n": 2}],
    "suffix": [{"max_match": 9}, {"min_prob": 0.5}, {"share_outputs": True}, {"max_shared_tokens": 99}],
}


@pytest.mark.parametrize("role", ["drafter", "fallback"])
@pytest.mark.parametrize(("name", "options"), [(name, one) for name in OTHERS for one in OTHERS[name]])
def test_drafters_that_look_for_other_texts_differ(
    folders: list[str], role: str, name: str, options: dict[str, int]
) -> None:
    drafting = {"drafter": "standalone", "draft_model": folders[1], role: name}
    plain, other = of(folders, **drafting), of(folders, **drafting, **{name: options})
    assert [key for key in plain if plain[key] != other[key]] == [role]


def test_every_option_of_a_lookup_is_tried() -> None:
    for name, options in (("ngram", Ngram), ("suffix", Suffix)):
        assert {key for one in OTHERS[name] for key in one} == {field.name for field in msgspec.structs.fields(options)}


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("acceptance", {"acceptance": "ratio"}),
        ("acceptance", {"acceptance": "block"}),
        ("synthetic acceptance", {"synthetic_acceptance": [0.8]}),
        ("fallback", {"fallback": "suffix"}),
    ],
)
def test_workers_whose_tokens_or_guesses_come_by_another_rule_differ(
    folders: list[str], key: str, asked: dict[str, object]
) -> None:
    common = {"allowed_policies": ["ar", "sd"], "drafter": "standalone", "draft_model": folders[1]}
    plain, other = of(folders, **common), of(folders, **common, **asked)
    assert [key for key in plain if plain[key] != other[key]] == [key]


def test_what_does_not_change_a_draft_is_not_asked_for(folders: list[str]) -> None:
    drafting = of(folders, drafter="standalone", draft_model=folders[1])
    assert drafting == of(folders, drafter="standalone", draft_model=folders[1], ngram={"max_n": 4})


def test_workers_that_tell_other_logprobs_differ(folders: list[str]) -> None:
    tree = {"model": {"name": folders[0]}, "speculation": {"placement": "local"}}
    plain, other = of(folders), fingerprint(load(tree | {"engine": {"logprobs_mode": "processed_logprobs"}}), CPU)
    assert [key for key in plain if plain[key] != other[key]] == ["logprobs"]
