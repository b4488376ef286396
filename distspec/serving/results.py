"""What a generation gave: pieces of text, whole completions, and how speculation went.

Knows values only.
"""

from __future__ import annotations

from dataclasses import dataclass

from distspec.protocol.values import TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Stats:
    """How one answer came about.

    tokens_per_round counts the bonus token, accepted does not. acceptance_by_position[i]: the share of
    drafted nodes at depth i+1 of a round that were accepted. Times in seconds, as this process saw them;
    time_per_output_token_s is None for a single token. What the coordinator counts is None where it never
    said. synthetic: the tokens were made up, for a benchmark. Where a stop string ended the answer, it has
    counted the whole round in which that was found.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    policy: str | None = None
    rounds: int | None = None
    tokens_per_round: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    acceptance_by_position: tuple[float, ...] | None = None
    time_to_first_token_s: float = 0.0
    time_per_output_token_s: float | None = None
    synthetic: bool = False


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What an answer tells of its prompt. text: with which the answer begins, where the prompt is echoed; offsets:
    where in it each token begins, of a completion that does so. logprobs: of the tokens from the second on, where asked
    for."""

    token_ids: tuple[int, ...]
    text: str = ""
    offsets: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. A token comes with the piece that ends its text; while a character or a stop string is
    unfinished, it is held back.

    finish_reason: "stop" | "length", and stats, are those of the last piece; prompt is that of the first. stop_reason:
    the string or the token of the request's stops that ended the answer. logprobs: of each token, where asked for;
    offsets: where in the text of the answer each token begins.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stats: Stats | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    prompt: PromptReport | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. token_ids end with the token that ended it (end of sequence, or of a stop string).

    seed and choice make it again: the same request with this seed gives the same tokens. logprobs, offsets and
    stop_reason as in Chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    choice: int
    stats: Stats
    prompt: PromptReport
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    stop_reason: int | str | None = None


def stats(
    usage: Usage | None, *, prompt_tokens: int, completion_tokens: int, first_token_s: float, total_s: float
) -> Stats:
    """Stats from what the coordinator counted (None: it never said) and what was measured here."""
    per_token = (total_s - first_token_s) / (completion_tokens - 1) if completion_tokens > 1 else None
    if usage is None:
        return Stats(
            prompt_tokens,
            completion_tokens,
            time_to_first_token_s=first_token_s,
            time_per_output_token_s=per_token,
        )
    judged = zip(usage.position_drafted, usage.position_accepted, strict=True)
    return Stats(
        prompt_tokens,
        completion_tokens,
        cached_tokens=usage.cached_tokens,
        policy=usage.policy,
        rounds=usage.rounds,
        tokens_per_round=usage.completion_tokens / usage.rounds if usage.rounds else None,
        drafted=usage.drafted,
        accepted=usage.accepted,
        acceptance_by_position=tuple(accepted / drafted if drafted else 0.0 for drafted, accepted in judged),
        time_to_first_token_s=first_token_s,
        time_per_output_token_s=per_token,
        synthetic=usage.synthetic,
    )
