"""The same prompts under each policy: the same tokens, and how long they took.

    .venv/bin/python deploy/drivers/compare_policies.py --max-tokens 64 --policies ar sd dsi

Exits with status 1 if a policy changed a token. In float32 on CPU none may; in bfloat16 on GPU the shape of a
batch can flip a token, which --allow-flips only counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import mean

from rich.console import Console
from rich.table import Table

from distspec import Fleet
from distspec.serving.results import Completion

PROMPTS = [
    "List the days of the week, then list them again in reverse.",
    "Write a short poem about the sea.",
    "Repeat this sentence three times: the cat sat on the mat.",
    "Explain why the sky is blue.",
    "Name five rivers of Europe and the sea that each flows into.",
]


def run(fleet: Fleet, policy: str, args: argparse.Namespace) -> tuple[list[Completion], float]:
    """The answers to all prompts, one after the other, and the seconds they took."""
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    start = time.perf_counter()
    answers = [
        fleet.generate(chat, policy=policy, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)[0]
        for chat in chats
    ]
    return answers, time.perf_counter() - start


def flips(answers: list[Completion], reference: list[Completion]) -> int:
    """How many answers are not the reference's, token by token."""
    return sum(ours.token_ids != theirs.token_ids for ours, theirs in zip(answers, reference, strict=True))


def row(policy: str, answers: list[Completion], seconds: float, changed: int) -> list[str]:
    stats = [answer.stats for answer in answers]
    tokens = sum(item.completion_tokens for item in stats)
    drafted, accepted = sum(item.drafted or 0 for item in stats), sum(item.accepted or 0 for item in stats)
    rounds = sum(item.rounds or 0 for item in stats)
    return [
        policy,
        f"{tokens / seconds:.1f}",
        f"{mean(item.time_to_first_token_s for item in stats) * 1000:.0f}",
        f"{tokens / rounds:.2f}" if rounds else "-",
        f"{accepted / drafted:.0%}" if drafted else "-",
        str(changed),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="local", help="a shipped configuration or a file")
    parser.add_argument("--address", help="a running Ray cluster; without it, one is started")
    parser.add_argument("--policies", nargs="+", default=["ar", "sd", "dsi"], help="the first is the reference")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--allow-flips", action="store_true")
    args = parser.parse_args()
    table = Table("policy", "tokens/s", "first token, ms", "tokens/round", "accepted", "answers changed")
    total = 0
    with Fleet(args.config, address=args.address) as fleet:
        run(fleet, args.policies[0], args)  # caches and threads warm up, so that the first policy is not the slow one
        reference: list[Completion] = []
        for policy in args.policies:
            answers, seconds = run(fleet, policy, args)
            reference = reference or answers
            changed = flips(answers, reference)
            total += changed
            table.add_row(*row(policy, answers, seconds, changed))
    Console().print(table)
    if total and not args.allow_flips:
        sys.exit(f"{total} answers are not those of {args.policies[0]}")


if __name__ == "__main__":
    main()
