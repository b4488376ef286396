"""A toy target: the next token is a hash of the whole text, the seed and the choice.

One wrong, missing or doubled token anywhere in the text changes everything after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from distspec.protocol.values import SamplingParams, TokenLogprobs, finish_reason


class ToyModel:
    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def outcome(self, text: Sequence[int], params: SamplingParams) -> int:
        """The token after `text`, in 0 .. vocab-1."""
        return hash((params.seed, params.choice, *text)) % self.vocab

    def logprobs(self, text: Sequence[int], params: SamplingParams) -> TokenLogprobs:
        """What is said of the token after `text`: nothing of the sort, but no other text has the same."""
        return TokenLogprobs(logprob=-float(hash((*text, params.seed)) % 9973), rank=1 + len(text))

    def plain(self, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], str]:
        """The output that everything must equal, and why it ends."""
        text, out = list(prompt), []
        while True:
            token = self.outcome(text, params)
            text.append(token)
            out.append(token)
            reason = finish_reason(params, len(out), token)
            if reason:
                return out, reason
