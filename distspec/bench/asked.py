"""What rounds cost whose rows ask for more than a draw: milliseconds, over those of the same rows that do not.

Knows what is asked, and rounds as bench.round runs them. Does not know requests, workers or books. Outcomes and guesses
are the models' own, since an answer must keep to its schema; with random weights next to no draft is right, but a
round takes as long whatever it brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
from msgspec.structs import replace

from distspec import config
from distspec.bench.engine import CONTEXT, HALF
from distspec.bench.report import Context, Row, machine, row
from distspec.bench.round import GREEDY, WARM, Cell, Rounds, named
from distspec.bench.spelled import ANSWER, Vocabulary
from distspec.errors import ConfigError, InvalidValue
from distspec.models import load_model
from distspec.protocol.values import SamplingParams

FIGURES = {"ms more": "more_ms", "tokens": "tokens_per_round"}
"""Columns of the table: what asking adds to a round, and the tokens that one that asks brings a request."""

_SAMPLED = SamplingParams(max_tokens=1, temperature=1.0)


ASKS = ("json", "chain")


@dataclass(frozen=True, slots=True)
class Ask:
    """batch: rows, each of which asks. plainly: the parameters of the rows that they are compared with. root: begins
    the output, None for any token."""

    name: str
    batch: int
    asks: SamplingParams
    plainly: SamplingParams
    root: int | None = None


def asks(vocabulary: Vocabulary) -> list[Ask]:
    """What the two speeds are promised for: a JSON schema on each of 16 rows, and the whole chain on each of 64."""
    json = replace(_SAMPLED, constraint=ANSWER, stop_token_ids=(vocabulary.end,))
    chain = replace(
        _SAMPLED,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logprobs=5,
    )
    return [Ask(ASKS[0], 16, json, _SAMPLED, vocabulary.begin), Ask(ASKS[1], 64, chain, GREEDY)]


def measure(
    pairs: Sequence[str],
    names: Sequence[str],
    steps: Sequence[int],
    rounds: int,
    repetitions: int,
    options: config.Engine,
) -> list[Row]:
    """Plain decoding and every number of drafts of pairs `TARGET+DRAFTER` of models with one vocabulary, on a GPU where
    there is one. names: of asks. Raises ConfigError for others, and for a model that cannot be had."""
    models = {pair: named(pair) for pair in pairs}
    if not set(names) <= set(ASKS):
        raise InvalidValue("asks", ",".join(names), f"some of {', '.join(ASKS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = machine("torch", "xgrammar") | {"device": str(device), "context": CONTEXT}
    if device.type == "cuda":
        context |= {"gpu": torch.cuda.get_device_name()}
        torch.set_num_threads(1)  # as workers compute beside a GPU
    found: list[Row] = []
    for pair, both in models.items():
        dtype = HALF if device.type == "cuda" else torch.float32
        target, drafter = (load_model(name, dtype=dtype, device=device) for name in both)
        if target.config.vocab_size != drafter.config.vocab_size:
            raise ConfigError("pairs", f"{pair}, need models of one vocabulary")
        vocabulary = Vocabulary(target.config.vocab_size)
        chosen = [ask for ask in asks(vocabulary) if ask.name in names]
        most = max(ask.batch for ask in chosen)
        room = CONTEXT + (rounds + 2 * WARM) * (max(steps, default=0) + 1)
        sized = replace(options, max_num_seqs=most, num_pages=most * options.pages_for(room))
        grammars = vocabulary.grammars()
        grammars.find(ANSWER).result()
        bench = Rounds(target, drafter, sized, None, device, max_model_len=room, grammars=grammars)
        for ask, count in product(chosen, (0, *steps)):
            cell = Cell(ask.batch, count, overlap=True)
            found.append(_row(f"asked/{pair}", bench, ask, cell, rounds, repetitions, context))
        del target, drafter, bench
    return found


def _row(name: str, bench: Rounds, ask: Ask, cell: Cell, rounds: int, repetitions: int, context: Context) -> Row:
    """Both kinds in turn, since machines are noisy; medians count."""
    times: list[tuple[float, float]] = []
    tokens = 0.0
    for _ in range(repetitions):
        plain_s, _ = bench.timed(cell, rounds, ask.plainly, ask.root)
        asking_s, tokens = bench.timed(cell, rounds, ask.asks, ask.root)
        times.append((asking_s * 1e3, plain_s * 1e3))
    asking, plain = (median(column) for column in zip(*times, strict=True))
    own: Context = {"more_ms": asking - plain, "tokens_per_round": tokens}
    return row(f"{name}/{cell.name}/{ask.name}", asking, "ms", plain, context | own)
