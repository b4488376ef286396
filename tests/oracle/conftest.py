"""What tests of whole fleets share: the tiny target, and its right answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from distspec.models import random_model, save_pretrained
from distspec.models.llama import Llama
from tests.matrix import CPU, GREEDY, REQUESTS, SHAPE, Answers
from tests.teacher import plain


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Products this small are done before a second thread has woken up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target() -> Llama:
    return random_model(SHAPE, seed=3, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="session")
def answers(target: Llama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    folder = tmp_path_factory.mktemp("target")
    save_pretrained(target, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right = {}
    for key, (prompt, params) in REQUESTS.items():
        right[key] = plain(target, prompt, params)
        if params == GREEDY:
            ids = torch.tensor([prompt])
            out = theirs.generate(ids, max_new_tokens=params.max_tokens, do_sample=False, eos_token_id=None)
            assert out[0, len(prompt) :].tolist() == right[key][0]
    answers = Answers(target, right)
    yield answers
    print(f"\n{answers.excused} of {answers.tokens} tokens excused by a margin")
    assert answers.excused <= answers.tokens // 1000
