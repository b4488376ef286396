"""Plain decoding without a server, beside a peer on the same weights, dtype and threads.

Knows how to run both sides in one process, in turn, since machines are noisy. Our side is what a decode worker
runs: a desk whose requests are leased. Does not know HTTP.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import msgspec
import torch

from distspec import models
from distspec.bench.prompts import CHAT, encoded
from distspec.bench.report import Context, Row, machine, row
from distspec.config import Config, load
from distspec.engine import Engine
from distspec.protocol.messages import Drop, Lease, Progress
from distspec.protocol.values import SamplingParams
from distspec.rounds import Desk

BATCHES = (1, 8)
Prompts = Sequence[list[int]]
Side = Callable[[Prompts, int], list[list[int]]]
"""(prompts, tokens) -> that many new tokens of each prompt, greedy, whatever the end-of-sequence token says."""


def measure(config: Config, threads: int, tokens: int, repetitions: int, *, through_fleet: bool) -> list[Row]:
    """Tokens per second, whole runs with their prefill: rows `offline/ar/b{batch}` against transformers.

    threads: of torch, 0 for all cores. through_fleet: rows `offline/ar/fleet/b{batch}` too. On a mismatch of
    tokens the rows' context says how many were equal.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    prompts = encoded(config.model.name, CHAT)
    sizes = {"threads": torch.get_num_threads(), "tokens": tokens, "repetitions": repetitions}
    context = machine("torch", "transformers") | {"model": config.model.name, "dtype": config.model.dtype} | sizes
    peer = transformers_side(config)
    sides = {"ar": desk_side(config)}
    rows: list[Row] = []
    with fleet_side(config) if through_fleet else _nothing() as fleet:
        if fleet is not None:
            sides["ar/fleet"] = fleet
        for batch in BATCHES:
            rows += compare(sides, peer, prompts[:batch], tokens, repetitions, context)
    return sorted(rows, key=lambda one: one.name)


def compare(
    sides: dict[str, Side],
    peer: Side,
    prompts: Prompts,
    tokens: int,
    repetitions: int,
    context: Context,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """All sides on the same prompts, one after the other, repeatedly; medians count."""
    everyone = {**sides, "peer": peer}
    times: dict[str, list[float]] = {name: [] for name in everyone}
    answers = {name: side(prompts, 2) for name, side in everyone.items()}  # so that nothing is done for the first time
    for _ in range(repetitions):
        for name, side in everyone.items():
            began_s = clock()
            answers[name] = side(prompts, tokens)
            times[name].append(clock() - began_s)
    rate = {name: len(prompts) * tokens / median(took) for name, took in times.items()}
    return [
        row(
            f"offline/{name}/b{len(prompts)}",
            rate[name],
            "tokens/s",
            rate["peer"],
            context | {"reference": "transformers", "equal_tokens": equal_share(answers[name], answers["peer"])},
        )
        for name in sides
    ]


def equal_share(ours: Prompts, theirs: Prompts) -> float:
    """Share of tokens that are the peer's, each answer counted up to the first that is not."""
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / sum(map(len, theirs))


# -- the sides -----------------------------------------------------------------------------------


def desk_side(config: Config) -> Side:
    """A decode worker's engine and desk. Every run is new: nothing is taken from the prefix cache."""
    device = torch.device("cpu")
    model = models.load_model(config.model.name, dtype=getattr(torch, config.model.dtype), device=device)
    options = msgspec.structs.replace(config.engine, prefix_cache=False)
    engine = Engine(model, options, device=device, max_model_len=config.model.max_model_len)
    desk = Desk(engine, None, max_num_batched_tokens=options.max_num_batched_tokens, clock=time.time)

    def run(prompts: Prompts, tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        for request, prompt in enumerate(prompts):
            desk.receive(Lease(request=request, epoch=0, start=0, tokens=tuple(prompt), params=params))
        answers: list[list[int]] = [[] for _ in prompts]
        while desk.ready():
            for reply in desk.step():
                assert isinstance(reply, Progress), reply
                answers[reply.request] += reply.tokens
        for request in range(len(prompts)):
            desk.receive(Drop(request=request, epoch=0))
        return answers

    return run


def transformers_side(config: Config) -> Side:
    """`generate` of transformers with its own defaults, prompts padded on the left."""
    from transformers import AutoModelForCausalLM

    folder = models.model_folder(config.model.name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.model.dtype)).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(prompts: Prompts, tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        answers: list[list[int]] = out[:, longest:].tolist()
        return answers

    return run


@contextmanager
def fleet_side(config: Config) -> Iterator[Side]:
    """A fleet of one decode worker on a Ray of its own, with this process's number of threads."""
    from distspec.serving.fleet import Fleet

    alone = {
        "name": f"{config.name}-bench",
        "model": msgspec.to_builtins(config.model),
        "engine": msgspec.to_builtins(config.engine) | {"num_threads": torch.get_num_threads(), "prefix_cache": False},
        "speculation": {"policy": "ar", "drafter": "none", "allowed_policies": ["ar"]},
    }
    with Fleet(load(alone)) as fleet:

        def run(prompts: Prompts, tokens: int) -> list[list[int]]:
            done = fleet.generate(list(prompts), max_tokens=tokens, temperature=0.0, ignore_eos=True)
            return [list(completion.token_ids) for completion in done]

        yield run


@contextmanager
def _nothing() -> Iterator[None]:
    yield None
