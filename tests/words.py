"""Small real tokenizers, made from a few lines of text."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('the assistant cannot speak last') }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "Ωμέγα 漢字 emoji 😀 naïve", "0 1 2 3 4 5 6 7 8 9"] * 3


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2, Llama 3, Qwen and SmolLM."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return _wrap(inner)


def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece-like: words with a leading mark, and bytes for what has no piece, as of Llama 2."""
    words = ["▁the", "▁quick", "▁", "a", "b", "é", "漢", "▁x", "xy"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(inner)


def _wrap(inner: Tokenizer) -> PreTrainedTokenizerFast:
    inner.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", chat_template=CHATML, clean_up_tokenization_spaces=False
    )
