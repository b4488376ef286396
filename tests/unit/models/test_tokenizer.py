"""A drafter's ids must mean to the target what they mean to the drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models

from distspec.errors import ConfigError
from distspec.models import TOKENIZER, load_tokenizer_folder, random_model, same_vocabulary, save_pretrained
from tests.shapes import LLAMA


def folder(path: Path, tokens: str | None, rows: int = 101, added: str | None = None) -> Path:
    """A checkpoint folder whose tokenizer knows these letters in this order; None: it has no tokenizer."""
    config = replace(LLAMA, vocab_size=rows)
    save_pretrained(random_model(config, seed=0, dtype=torch.float32, device=torch.device("cpu")), path)
    if tokens is not None:
        tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
        if added is not None:
            tokenizer.add_special_tokens([AddedToken(added)])
        tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ({"tokens": "abc"}, {"tokens": "abc"}),
        ({"tokens": "abc", "rows": 128}, {"tokens": "abc"}),
        ({"tokens": "abc", "added": "<end>"}, {"tokens": "abc", "added": "<end>"}),
        ({"tokens": None}, {"tokens": None}),
    ],
)
def test_a_drafter_with_the_same_ids_is_taken(target: dict, drafter: dict, tmp_path: Path) -> None:
    same_vocabulary(folder(tmp_path / "target", **target), folder(tmp_path / "drafter", **drafter))


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        ({"tokens": "abc"}, {"tokens": "acb"}, r"token '[bc]' is [12], the target has [12]"),
        ({"tokens": "abc"}, {"tokens": "abcd"}, "token 'd' is 3, the target has None"),
        ({"tokens": "abc", "added": "<end>"}, {"tokens": "abc"}, "token '<end>' is None, the target has 3"),
        ({"tokens": "abc"}, {"tokens": "abc", "rows": 128}, "128 token ids, the target has 101"),
        ({"tokens": "abc"}, {"tokens": None}, r"no tokenizer\.json in .*drafter"),
        ({"tokens": None}, {"tokens": "abc"}, r"no tokenizer\.json in .*target"),
        ({"tokens": None}, {"tokens": None, "rows": 100}, r"no tokenizer\.json"),
    ],
)
def test_any_other_is_refused_with_what_differs(target: dict, drafter: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        same_vocabulary(folder(tmp_path / "target", **target), folder(tmp_path / "drafter", **drafter))
    assert caught.value.path == "speculation.draft_model"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}, "added_tokens": [{}]}'],
)
def test_a_damaged_tokenizer_is_an_error_of_ours(text: str, tmp_path: Path) -> None:
    (tmp_path / TOKENIZER).write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_tree()))
    with pytest.raises(ConfigError, match="tokenizer"):
        same_vocabulary(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer_folder(tmp_path)
