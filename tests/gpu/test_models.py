"""Models on a GPU: the same weights and arithmetic, and no second copy of the weights on the way there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distspec.models import load_model, random_model, save_pretrained
from tests.causal import logits
from tests.shapes import KINDS, LLAMA

pytestmark = pytest.mark.needs("gpu")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOKENS = [(7 * i * i + 3 * i) % LLAMA.vocab_size for i in range(64)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_what_a_cpu_computes(kind: str) -> None:
    ours, reference = (random_model(KINDS[kind], seed=4, dtype=torch.float32, device=at) for at in (CUDA, CPU))
    torch.testing.assert_close(logits(ours, TOKENS).cpu(), logits(reference, TOKENS), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_the_truth_as_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model(LLAMA, seed=4, dtype=dtype, device=CUDA)
    save_pretrained(model, tmp_path)
    truth = logits(load_model(str(tmp_path), dtype=torch.float32, device=CPU), TOKENS)
    found = logits(model, TOKENS)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).to(CUDA)
    with torch.inference_mode():
        reference = theirs(torch.tensor([TOKENS], device=CUDA)).logits[0].float()
    assert found.dtype == torch.float32
    assert (found != found.to(dtype)).float().mean() > 0.9
    error, their_error = ((x.cpu() - truth).pow(2).mean().sqrt() for x in (found, reference))
    assert error < 1.5 * their_error


def test_loading_holds_no_second_copy(tmp_path: Path) -> None:
    config = replace(LLAMA, hidden_size=1024, intermediate_size=4096, num_layers=8, head_dim=64)
    save_pretrained(random_model(config, seed=4, dtype=torch.bfloat16, device=CPU), tmp_path)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(str(tmp_path), dtype=torch.bfloat16, device=CUDA)
    held = sum(weight.nbytes for weight in model.weights.values()) + model.rope.nbytes
    largest = max(weight.nbytes for weight in model.weights.values())
    assert torch.cuda.max_memory_allocated() - before < held + 1.5 * largest
