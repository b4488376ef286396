"""Every policy on one real fleet: the same prompts and workers, in turn, while nothing else runs there.

Knows what each policy is asked for, and what clients and the coordinator's counters say of a run. Does not know how
rows are shown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from statistics import mean, median
from typing import get_args

from msgspec import structs

from distspec.bench.offline import equal_share
from distspec.bench.prompts import Prompts
from distspec.bench.report import Context, Row, machine
from distspec.config import LOCAL_POLICIES, Config, PolicyName
from distspec.errors import InvalidValue
from distspec.metrics import Family
from distspec.protocol.values import SamplingParams, SpeculationChoice, Usage
from distspec.sim.timed import Measured
from distspec.workers.client import Client
from distspec.workers.fleet import FleetHandle

TARGETS = ("decode", "verify")


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy as requests choose it. name: of its rows. steps: drafted levels, None as configured."""

    name: str
    policy: PolicyName
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """batches: numbers of requests that run at once, each of so many tokens. label: what the prompts are."""

    batches: Sequence[int]
    prompts: Prompts
    label: str
    tokens: int
    repetitions: int


@dataclass(slots=True)
class Stream:
    """What one client got. arrivals: (moment in seconds, how many tokens came)."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Counted:
    """The coordinator's counters at a moment: seconds that targets and drafters were busy, drafted nodes judged."""

    target_s: float
    drafter_s: float
    judged: float

    @classmethod
    def of(cls, families: Iterable[Family]) -> Counted:
        known = {family.name: family.samples for family in families}
        busy = {(s.labels["worker"], s.labels["model"]): s.value for s in known["distspec_busy_seconds_total"]}
        return cls(
            sum(s for (worker, model), s in busy.items() if model == "target" and worker.startswith(TARGETS)),
            sum(s for (_, model), s in busy.items() if model == "drafter"),
            sum(sample.value for sample in known["distspec_judged_nodes_total"]),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One policy, once, with all requests of a batch."""

    streams: Sequence[Stream]
    took_s: float
    before: Counted
    after: Counted

    @property
    def rate(self) -> float:
        """Tokens per second: those of the streams added up."""
        return sum(pace(stream.arrivals) for stream in self.streams)

    def figures(self, config: Config) -> Measured:
        """As a simulated run has them. Busy shares are of the whole run: of decode and verify workers, and of the
        workers that draft."""
        pools, local = config.pools, config.speculation.placement == "local"
        usages = [stream.usage for stream in self.streams]
        rounds = max(1, sum(usage.rounds for usage in usages))
        accepted = sum(usage.accepted for usage in usages)
        judged = self.after.judged - self.before.judged
        drafters = pools.decode.replicas if local else max(1, pools.draft.replicas)
        return Measured(
            tokens_s=self.rate,
            token_s=len(self.streams) / self.rate,
            accepted=accepted / rounds,
            hits=sum(usage.hits for usage in usages) / rounds,
            target_busy=self._share(self.before.target_s, self.after.target_s, _targets(config)),
            draft_busy=self._share(self.before.drafter_s, self.after.drafter_s, drafters),
            wasted=1 - min(accepted, judged) / judged if judged else 0.0,
        )

    def _share(self, before_s: float, after_s: float, workers: int) -> float:
        return (after_s - before_s) / self.took_s / workers


def choices(config: Config) -> tuple[list[Choice], dict[str, str]]:
    """What the fleet of a configuration can run, `ar` first, and why it cannot run the rest.

    `sd112` drafts one token a round. Raises InvalidValue without `ar`, which all are compared with.
    """
    spec = config.speculation
    if "ar" not in config.policies:
        raise InvalidValue("speculation.allowed_policies", list(config.policies), "ar, which all are compared with")
    able: list[Choice] = []
    refused: dict[str, str] = {}
    for policy in get_args(PolicyName):
        variants = [Choice(policy, policy), *([Choice("sd112", policy, steps=1)] if policy == "sd" else [])]
        for choice in variants:
            reason = _why_not(config, choice)
            if reason is None:
                able.append(choice)
            elif spec.drafter != "none":
                refused[choice.name] = reason
    return able, refused


def measure(
    config: Config, plan: Plan, *, address: str | None = None, say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Rows `policies/{policy}/b{batch}/{label}` in tokens per second, against `ar` of the same repetition; their names
    end in `/a{acceptance}` where guesses are made up.

    A fleet of its own is started once. Each repetition has prompts of its own, which all policies are given in turn,
    back and forth, so that what drifts hits all alike; their KV is cached before. value: the median repetition's;
    ratio: the median of ratios. say: is told of every run, since all take minutes. Raises ConfigError, FleetError, or
    RequestError for requests that do not fit.
    """
    from distspec.serving.cluster import cluster
    from distspec.serving.connect import launch

    able, _ = choices(config)
    slots = config.pools.decode.replicas * config.engine.max_num_seqs
    if max(plan.batches) > slots:
        raise InvalidValue("batch", max(plan.batches), f"at most {slots}, the engine.max_num_seqs of decode workers")
    config = structs.replace(config, name=f"{config.name}-bench")
    with ExitStack() as stack:
        stack.enter_context(cluster(address))
        handle = launch(config)
        stack.callback(handle.shutdown)
        runs = asyncio.run(_all(handle, able, plan, say))
    here = context(config, plan)
    return [one for batch in plan.batches for one in rows(runs[batch], config, plan, batch, here)]


def rows(runs: dict[str, list[Run]], config: Config, plan: Plan, batch: int, here: Context) -> list[Row]:
    """One row per policy. runs: by policy, in the order of repetitions."""
    figures = {name: [run.figures(config) for run in several] for name, several in runs.items()}
    tokens = {name: [[stream.tokens for stream in run.streams] for run in several] for name, several in runs.items()}
    plain = [one.tokens_s for one in figures["ar"]]
    made_up = config.speculation.synthetic_acceptance
    label = plan.label if made_up is None else f"{plan.label}/a{made_up[0]:g}"
    out = []
    for name, several in figures.items():
        middle = Measured(*(median(getattr(one, f.name) for one in several) for f in fields(Measured)))
        ratio = median(one.tokens_s / reference for one, reference in zip(several, plain, strict=True))
        same = mean(equal_share(*pair) for pair in zip(tokens[name], tokens["ar"], strict=True))
        facts = here | asdict(middle) | {"equal_tokens": same}
        row_name = f"policies/{name}/b{batch}/{label}"
        out.append(Row(row_name, middle.tokens_s, "tokens/s", median(plain), ratio, facts))
    return out


def pace(arrivals: Sequence[tuple[float, int]]) -> float:
    """Tokens per second of one stream after its first message, which tells how long the prompt took.

    Raises InvalidValue for a single message.
    """
    (begin_s, first), (end_s, _) = arrivals[0], arrivals[-1]
    if end_s <= begin_s:
        raise InvalidValue("tokens", sum(count for _, count in arrivals), "more than come in one message")
    return (sum(count for _, count in arrivals) - first) / (end_s - begin_s)


def context(config: Config, plan: Plan) -> Context:
    """Machine, versions, model and sizes; whether tokens were made up."""
    import torch

    spec = config.speculation
    facts: Context = {"model": config.model.name, "dtype": config.model.dtype, "drafter": spec.drafter}
    facts |= {"placement": spec.placement, "tokens": plan.tokens, "repetitions": plan.repetitions}
    facts |= {f"{name} workers": getattr(config.pools, name).replicas for name in (*TARGETS, "draft")}
    if spec.draft_model is not None:
        facts["draft_model"] = spec.draft_model
    if spec.synthetic_acceptance is not None:
        facts["synthetic"] = ",".join(f"{share:.4g}" for share in spec.synthetic_acceptance)
    if config.asks_for_gpu("decode") and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return machine("torch", "ray", "msgspec") | facts | {"reference": "ar, median over repetitions"}


# -- on the fleet ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Session:
    """A client of a fleet that nobody else uses."""

    handle: FleetHandle
    client: Client
    plan: Plan
    say: Callable[[str], None]

    async def cell(self, able: Sequence[Choice], batch: int) -> dict[str, list[Run]]:
        """By policy, in the order of repetitions."""
        runs: dict[str, list[Run]] = {choice.name: [] for choice in able}
        for choice in able:  # so that nothing is done for the first time; their prompts are others
            run = await self._run(choice, range(-batch, 0))
            self.say(f"b{batch} {choice.name}: warm after {run.took_s:.1f} s")
        for repetition in range(self.plan.repetitions):
            numbers = range(repetition * batch, (repetition + 1) * batch)
            await asyncio.gather(*(self._stream(able[0], i, tokens=1) for i in numbers))  # caches the prompts
            for choice in able if repetition % 2 == 0 else reversed(able):
                run = await self._run(choice, numbers)
                runs[choice.name].append(run)
                self.say(f"b{batch} {choice.name}: {run.rate:.4g} tokens/s, {repetition + 1}/{self.plan.repetitions}")
        return runs

    async def _run(self, choice: Choice, numbers: range) -> Run:
        await self._rest()
        before = Counted.of(await self.handle.metrics())
        began_s = time.perf_counter()
        streams = await asyncio.gather(*(self._stream(choice, i, self.plan.tokens) for i in numbers))
        took_s = time.perf_counter() - began_s
        return Run(streams, took_s, before, Counted.of(await self.handle.metrics()))

    async def _stream(self, choice: Choice, number: int, tokens: int) -> Stream:
        """Greedy, whatever the end-of-sequence token says. The seed decides tokens that are made up."""
        stream = Stream()
        params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=number % (1 << 32))
        speculation = SpeculationChoice(policy=choice.policy, num_speculative_tokens=choice.steps)
        async for output in self.client.submit(self.plan.prompts(number), params, speculation):
            if output.tokens:
                stream.arrivals.append((time.perf_counter(), len(output.tokens)))
                stream.tokens += output.tokens
            stream.usage = output.usage or stream.usage
        return stream

    async def _rest(self) -> None:
        """Until the workers have let go of everything, so that no run pays for the one before."""
        while True:
            workers = (await self.handle.status())["workers"].values()
            if not any(worker["open"] for worker in workers):
                return
            await asyncio.sleep(0.01)


async def _all(
    handle: FleetHandle, able: Sequence[Choice], plan: Plan, say: Callable[[str], None]
) -> dict[int, dict[str, list[Run]]]:
    """By batch and policy."""
    client = handle.client()
    await client.start()
    try:
        session = _Session(handle, client, plan, say)
        return {batch: await session.cell(able, batch) for batch in plan.batches}
    finally:
        await client.close()


# -- helpers ---------------------------------------------------------------------------------------


def _why_not(config: Config, choice: Choice) -> str | None:
    spec = config.speculation
    if choice.policy not in config.policies:
        return "not in speculation.allowed_policies"
    if choice.name == "sd112" and spec.topk > 1:
        return f"speculation.topk is {spec.topk}, its rounds draft one token"
    if spec.placement == "local" and choice.policy not in LOCAL_POLICIES:
        return "the drafter sits in the worker that verifies (speculation.placement=local)"
    if choice.policy == "bvsp" and _targets(config) < 2:
        return "it wants a second target worker; with one it is ssd"
    return None


def _targets(config: Config) -> int:
    return config.pools.decode.replicas + config.pools.verify.replicas
