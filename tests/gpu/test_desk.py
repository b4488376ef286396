"""Leases on a GPU: rounds that roll, beside requests that come, prefill and end, stream what plain decoding on a CPU
does."""

from __future__ import annotations

import random
import time

import pytest
import torch

from distspec import config
from distspec.drafters.base import Drafter
from distspec.drafters.ngram import NgramDrafter
from distspec.drafters.standalone import StandaloneDrafter
from distspec.engine import Engine
from distspec.models import random_model
from distspec.protocol.messages import Drop
from distspec.protocol.values import SamplingParams
from distspec.rounds import Desk, Reply
from tests.desks import SHAPE, guard, lease, plain, stream

pytestmark = pytest.mark.needs("gpu")
CUDA = torch.device("cuda")


def engine(seed: int) -> Engine:
    options = config.Engine(page_size=4, num_pages=600, max_num_seqs=8, max_scratch_nodes=16)
    return Engine(random_model(SHAPE, seed=seed, dtype=torch.float32, device=CUDA), options, device=CUDA)


def drafter(name: str) -> Drafter | None:
    longest = SHAPE.max_position
    if name == "ngram":
        return NgramDrafter(config.Ngram(), max_model_len=longest, device=CUDA)
    if name == "none":
        return None
    own = engine(0 if name == "itself" else 1)
    return StandaloneDrafter(own, max_num_batched_tokens=64, max_scratch_nodes=16, max_model_len=longest)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["none", "itself", "another", "ngram"])
def test_streams_are_those_of_plain_decoding(name: str, overlap: bool) -> None:
    draw, target = random.Random(name), engine(0)
    subject = Desk(target, drafter(name), max_num_batched_tokens=64, clock=time.perf_counter, overlap=overlap)
    subject.prepare([0] if name == "none" else [3])
    guard(subject)
    replies: list[Reply] = []
    gone: set[int] = set()
    asked: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
    for request in range(12):
        prompt = tuple(draw.randrange(11) for _ in range(draw.randint(1, 40)))
        params = SamplingParams(
            max_tokens=draw.randint(1, 40),
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.getrandbits(64),
            top_p=draw.choice([1.0, 0.9]),
            stop_token_ids=draw.choice([(), (3,)]),
            prompt_tokens=len(prompt),
            frequency_penalty=draw.choice([0.0, 0.0, 0.7]),
            logprobs=draw.choice([None, None, 2]),
        )
        asked[request] = prompt, params
        while len(asked.keys() - ended(replies)) > 6:
            replies += subject.step()
        for other in ended(replies) - gone:
            replies += subject.receive(Drop(request=other, epoch=1))
            gone.add(other)
        replies += subject.receive(lease(request, prompt, params, 0 if name == "none" else 3))
        for _ in range(draw.randint(0, 4)):
            replies += subject.step() if subject.ready() else []
    while subject.ready():
        replies += subject.step()
        subject.check()
    for request, (prompt, params) in asked.items():
        assert stream(replies, request) == plain(prompt, params)


def ended(replies: list[Reply]) -> set[int]:
    return {reply.request for reply in replies if getattr(reply, "ended", None) is not None}
