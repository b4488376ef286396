"""A tiny random model with a real tokenizer and chat template, as a checkpoint folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distspec.models import random_model, save_pretrained
from tests.shapes import TINY
from tests.words import byte_level

CONTEXT, VOCAB = 2048, 330


def save_worded_model(folder: Path) -> None:
    shape = replace(TINY, vocab_size=VOCAB, max_position=CONTEXT, tie_embeddings=True, eos_token_ids=(320,))
    model = random_model(shape, seed=3, dtype=torch.float32, device=torch.device("cpu"))
    save_pretrained(model, folder, byte_level())
