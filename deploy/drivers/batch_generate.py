"""Answer a file of prompts: one prompt a line in, one JSON object a line out, in the order of the prompts.

    .venv/bin/python deploy/drivers/batch_generate.py prompts.txt answers.jsonl --max-tokens 64 --temperature 0.2

A line that starts with `{` or `[` is JSON: {"prompt": ..., and any parameters of its own}, or the messages of a
chat. Answers are written as they are known; a run that was interrupted goes on behind the last whole line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from distspec import Fleet
from distspec.errors import RequestError


def read(path: Path) -> list[dict[str, Any]]:
    """One request for each line that is not blank: its prompt and its own parameters."""
    requests = []
    for line in filter(str.strip, path.read_text().splitlines()):
        parsed = json.loads(line) if line.startswith(("{", "[")) else line
        requests.append(parsed if isinstance(parsed, dict) else {"prompt": parsed})
    return requests


async def answer(fleet: Fleet, request: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The answers to one request, or what is wrong with it: one bad line does not end the run."""
    params = defaults | request
    prompt = params.pop("prompt", "")
    try:
        completions = await fleet.agenerate([prompt], **params)
    except RequestError as error:
        return {"prompt": prompt, "error": error.message}
    return {"prompt": prompt, "answers": msgspec.to_builtins(completions)}


def whole_lines(path: Path) -> int:
    """Answers that an earlier run has written; half a line at the end is cut off."""
    if not path.exists():
        return 0
    written = path.read_bytes()
    path.write_bytes(written[: written.rfind(b"\n") + 1])
    return written.count(b"\n")


async def run(args: argparse.Namespace) -> int:
    requests = read(args.prompts)
    done = whole_lines(args.answers)
    asked = {name: vars(args)[name] for name in ("max_tokens", "temperature", "seed", "policy")}
    defaults = {name: value for name, value in asked.items() if value is not None}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tokens = failed = 0
    async with Fleet(args.config, args.overrides, address=args.address) as fleet:
        tasks = [asyncio.create_task(answer(fleet, request, defaults)) for request in requests[done:]]
        with Progress(*columns, console=Console(stderr=True)) as bar, args.answers.open("a") as out:
            shown = bar.add_task("answering", total=len(requests), completed=done)
            for task in tasks:
                result = await task
                out.write(json.dumps(result, ensure_ascii=False) + "\n")
                out.flush()
                failed += "error" in result
                tokens += sum(len(item["token_ids"]) for item in result.get("answers", ()))
                bar.update(shown, advance=1, description=f"{tokens} tokens")
    print(f"{len(requests)} prompts, {tokens} new tokens, {failed} refused -> {args.answers}", file=sys.stderr)
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--config", default="local", help="a shipped configuration or a file")
    parser.add_argument("--address", help="a running Ray cluster; without it, one is started")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--policy")
    parser.add_argument("overrides", nargs="*", help="as pools.verify.replicas=2")
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
