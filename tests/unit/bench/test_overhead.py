"""The overhead bench drives the real coordinator: its toy streams are right, and rounds are what they claim."""

from __future__ import annotations

import pytest

from distspec.bench.overhead import POLICIES, SLOW, coordinator_process, measure
from distspec.bench.toy import WORKERS, ToyDrafter, ToyWorker, outcome
from distspec.protocol.keys import Endpoint
from distspec.protocol.messages import Output
from distspec.protocol.values import SamplingParams, SpeculationChoice
from distspec.workers.client import Client


def test_there_is_a_row_for_each_policy() -> None:
    rows = measure(rounds=10, repetitions=1)
    assert [one.name for one in rows] == [f"overhead/{policy}" for policy in (*POLICIES, SLOW)]
    assert all(one.value > 0 and one.ratio == one.value / one.reference for one in rows)


def test_what_a_toy_sleeps_is_known() -> None:
    toy = ToyDrafter()
    toy.step()
    assert toy.busy_s == 0
    toy.forward_s = 2e-3
    for steps in (1, 2):
        toy.step()
        assert toy.busy_s >= steps * toy.forward_s


@pytest.mark.parametrize("policy", POLICIES)
async def test_toy_streams_follow_the_rule_through_the_real_coordinator(policy: str) -> None:
    with coordinator_process() as endpoint:
        outputs = await _stream(endpoint, policy)
    tokens = [token for output in outputs for token in output.tokens]
    assert len(tokens) == 50
    assert tokens == [outcome(token) for token in [3, *tokens[:-1]]]
    usage = outputs[-1].usage
    assert usage is not None
    # The first token is the prefill's. Whether `dsi` sees a draft in time is luck where targets are instant.
    if policy == "ar":
        assert (usage.rounds, usage.drafted) == (49, 0)
    elif policy == "sd":
        assert usage.rounds < 40
        assert 0 < usage.accepted < usage.drafted  # or it would measure rounds of one kind only


async def _stream(endpoint: Endpoint, policy: str) -> list[Output]:
    async def find() -> Endpoint:
        return endpoint

    workers = [ToyWorker(name) for name in WORKERS]
    for worker in workers:
        await worker.join(endpoint, 10.0)
    client = Client(find)
    await client.start()
    outputs = []
    async for output in client.submit((1, 2, 3), SamplingParams(max_tokens=50), SpeculationChoice(policy=policy)):
        outputs.append(output)
        for worker in workers:
            worker.go()
    await client.close()
    for worker in workers:
        worker.close()
    return outputs
