"""`distspec generate`: one answer on the terminal, or one JSON object for a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from distspec.cli.options import Address, ConfigName, Overrides

if TYPE_CHECKING:
    from distspec.serving.driver import Params, Prompt
    from distspec.serving.fleet import Fleet
    from distspec.serving.results import Stats


def generate(
    prompt: Annotated[str, typer.Option(help="The text to continue, or with --chat what the user says.")],
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    policy: Annotated[str | None, typer.Option(help="Speculation policy of this request, as sd.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    config: ConfigName = "local",
    address: Address = None,
    overrides: Overrides = None,
) -> None:
    """Generate one answer with a fleet of its own, or with the one that runs at --address."""
    from distspec.serving.cluster import whose
    from distspec.serving.fleet import Fleet
    from distspec.workers.logs import tell

    tell()
    asked = {"policy": policy, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    params: Params = {name: value for name, value in asked.items() if value is not None}  # type: ignore[assignment]
    text: Prompt = [{"role": "user", "content": prompt}] if chat else prompt
    made = Fleet(config, overrides or (), address=address)
    if whose(address) == "local":
        print(f"starting fleet {made.config.name}; --address auto asks one that runs already ...", file=sys.stderr)
    with _stdout_to_ourselves() as out, made as fleet:
        if as_json:
            _print_json(fleet, text, params, out)
        else:
            _print_stream(fleet, text, params, out)


def _print_json(fleet: Fleet, prompt: Prompt, params: Params, out: TextIO) -> None:
    import msgspec

    [answer] = fleet.generate([prompt], **params)
    json.dump(msgspec.to_builtins(answer), out, ensure_ascii=False)
    out.write("\n")


def _print_stream(fleet: Fleet, prompt: Prompt, params: Params, out: TextIO) -> None:
    for chunk in fleet.stream(prompt, **params):
        out.write(chunk.text)
        out.flush()
        if chunk.stats is not None:
            out.write("\n")
            print(_summary(chunk.stats), file=sys.stderr)


def _summary(stats: Stats) -> str:
    parts = [f"{stats.completion_tokens} tokens", f"first after {stats.time_to_first_token_s:.3f} s"]
    if stats.time_per_output_token_s:
        parts.append(f"then {1 / stats.time_per_output_token_s:.1f} tokens/s")
    if stats.rounds is not None:
        parts.append(f"policy {stats.policy}")
    if stats.tokens_per_round is not None:
        parts.append(
            f"{stats.tokens_per_round:.2f} tokens a round, {stats.accepted} of {stats.drafted} drafts accepted"
        )
    return ", ".join(parts)


@contextmanager
def _stdout_to_ourselves() -> Iterator[TextIO]:
    """Our own stdout; what libraries and child processes write to theirs goes to stderr meanwhile."""
    import os

    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)
