"""Commands that measure, one for each part of a fleet.

What they measure comes in with them, since most of it imports torch or Ray.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distspec.cli.options import Address, ConfigName, Json, Overrides, Png

if TYPE_CHECKING:
    from distspec.bench.report import Row

app = typer.Typer(
    help="Measure on this machine; every command compares with a peer or a bound of the same run.",
    no_args_is_help=True,
    add_completion=False,
)

Early = Annotated[bool, typer.Option(help="Kernels start while the one before ends, where the GPU can do that.")]


@app.command("acceptance")
def measure_acceptance(
    model: Annotated[str, typer.Option(help="The target; a model name, or a folder.")] = "smollm2-135m",
    layers: Annotated[int, typer.Option(min=1, help="Its first layers are the drafter.")] = 28,
    temperatures: Annotated[str, typer.Option(help="Of requests.")] = "0.7,1.0",
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Of requests.")] = 0.95,
    distances: Annotated[str, typer.Option(help="Of random distributions, in place of a drafter's.")] = "0.3,0.5,1.0",
    steps: Annotated[int, typer.Option(min=1, help="Drafts of a round.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Chat prompts that are answered at once.")] = 48,
    tokens: Annotated[int, typer.Option(min=8, help="Of each answer.")] = 40,
    json: Json = None,
) -> None:
    """Drafts that are kept of a round by each speculation.acceptance, over those that `coupled` keeps, on the CPU."""
    from distspec.bench import acceptance
    from distspec.bench.policies import numbers
    from distspec.bench.report import report

    rows = acceptance.synthetic(numbers("distances", distances, 0), steps, rounds=4000)
    heats = numbers("temperatures", temperatures, 0)
    rows += acceptance.measure(model, layers, heats, top_p, steps, requests, tokens)
    report(rows, json, acceptance.FIGURES)


@app.command("attention")
def measure_attention(
    shapes: Annotated[str, typer.Option(help="Of models; see the names after `random:`.")] = "llama-8b,qwen3-0.6b",
    backends: Annotated[str, typer.Option(help="As engine.attention_backend.")] = "triton,sdpa",
    batch: Annotated[str, typer.Option(help="Numbers of requests.")] = "1,4,16",
    contexts: Annotated[str, typer.Option(help="Tokens of each request.")] = "1024,4096,16384",
    page_size: Annotated[int, typer.Option(min=1, help="As engine.page_size.")] = 16,
    json: Json = None,
) -> None:
    """Microseconds of a layer's attention beside the time that its keys and values take, on one GPU."""
    from distspec.bench.attention import measure
    from distspec.bench.policies import counts
    from distspec.bench.report import report

    requests, lengths = counts("batch", batch), counts("contexts", contexts)
    report(measure(shapes.split(","), backends.split(","), requests, lengths, page_size), json)


@app.command("engine")
def measure_engine(
    shapes: Annotated[str, typer.Option(help="Of models; see the names after `random:`.")] = (
        "qwen3-0.6b,llama-1b,llama-8b,qwen3-32b"
    ),
    batch: Annotated[str, typer.Option(help="Numbers of requests of a decode step.")] = "1,16",
    nodes: Annotated[str, typer.Option(help="Numbers of rows of a verify step of one request.")] = "1,8,64",
    repetitions: Annotated[int, typer.Option(min=1, help="Steps of each kind; medians count.")] = 30,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Milliseconds of a step beside the time that weights and KV take, on one GPU, with random weights."""
    from distspec.bench.engine import measure
    from distspec.bench.policies import counts
    from distspec.bench.report import report
    from distspec.config import load

    requests, rows = counts("batch", batch), counts("nodes", nodes)
    options = load("local", [*(overrides or ()), f"engine.max_num_seqs={max(requests)}"]).engine
    report(measure(shapes.split(","), requests, rows, repetitions, options), json)


@app.command("kernels")
def measure_kernels(
    shapes: Annotated[str, typer.Option(help="Of models; see the names after `random:`.")] = (
        "qwen3-0.6b,llama-1b,llama-8b,qwen3-32b"
    ),
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,8,16,64",
    forwards: Annotated[bool, typer.Option(help="Also whole forwards at a context of 1,024 tokens.")] = True,
    early: Early = True,
    json: Json = None,
) -> None:
    """Microseconds of each fused kernel beside the time that its bytes take, on one GPU, with random weights."""
    from distspec.bench.kernels import measure
    from distspec.bench.policies import counts
    from distspec.bench.report import report

    with _launches(early):
        found = measure([shape.strip() for shape in shapes.split(",")], counts("rows", rows), forwards=forwards)
    report(found, json)


@app.command("offline")
def measure_offline(
    against: Annotated[Literal["transformers"], typer.Option(help="The peer.")] = "transformers",
    model: Annotated[str | None, typer.Option(help="Instead of the configuration's model.name.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Of torch, for both sides; 0: all cores.")] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each side, in turn; medians count.")] = 5,
    fleet: Annotated[bool, typer.Option("--fleet", help="Also through a fleet of one decode worker.")] = False,
    config: ConfigName = "local",
    json: Json = None,
    overrides: Overrides = None,
) -> None:
    """Tokens per second of plain decoding, at batch 1 and 8, without a server."""
    from distspec.workers.threads import spin_briefly

    spin_briefly()  # as workers do; the peer has the same
    from distspec.bench.offline import measure
    from distspec.bench.report import report
    from distspec.config import load

    chosen = [*(overrides or ()), *([f"model.name={model}"] if model else [])]
    report(measure(load(config, chosen), threads, tokens, repetitions, through_fleet=fleet), json)


@app.command("overhead")
def measure_overhead(
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of a run, about.")] = 1000,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each policy, in turn; medians count.")] = 5,
    json: Json = None,
) -> None:
    """Milliseconds that coordinator and channel add to a round: workers that need no time, or sleep; real sockets. And
    of the coordinator's machine alone, where trees are large."""
    from distspec.bench import overhead, trees
    from distspec.bench.report import report

    report([*overhead.measure(rounds, repetitions), *trees.measure(rounds, repetitions)], json)


@app.command("policies")
def measure_policies(
    config: ConfigName = "local",
    prompts: Annotated[str, typer.Option(help="chat, copy, or how many random tokens each prompt has.")] = "chat",
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each policy, in turn; medians count.")] = 5,
    simulate: Annotated[
        str | None, typer.Option(help="In virtual time instead, by curves that ship, as h200-32b-0.6b.")
    ] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="Simulated: how often the first guess is right. [0.5,0.7,0.9]")
    ] = None,
    synthetic: Annotated[
        str | None, typer.Option(help="Simulated: so often the first, second, third guess is right, as 0.8,0.1,0.03.")
    ] = None,
    verifiers: Annotated[str | None, typer.Option(help="Simulated: numbers of target workers. [1,2,4]")] = None,
    trees: Annotated[bool, typer.Option("--trees", help="Simulated: also with trees of 64 nodes.")] = False,
    batch: Annotated[str | None, typer.Option(help="Requests that run at once. [1,8; simulated 1,8,64]")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=8, help="Of each request [64]; simulated, of all together [6000].")
    ] = None,
    png: Png = None,
    json: Json = None,
    address: Address = None,
    overrides: Overrides = None,
) -> None:
    """Every policy on the same prompts and workers: a fleet of its own, started once; or simulated, at best sizes."""
    from distspec.bench import policies
    from distspec.bench.report import report

    whole = policies.counts("batch", _or(batch, "1,8" if simulate is None else "1,8,64"))
    if simulate is not None:
        chances = policies.chances(acceptance, synthetic)
        pools = policies.counts("verifiers", _or(verifiers, "1,2,4"))
        rows = policies.simulated(simulate, whole, chances, pools, tokens or 6000, trees)
    else:
        _refuse_simulated(acceptance=acceptance, synthetic=synthetic, verifiers=verifiers, trees=trees)
        rows = _live(config, overrides, address, whole, prompts, tokens or 64, repetitions)
    report(rows, json, policies.FIGURES)
    if png is not None:
        from distspec.bench import bars

        (bars.draw_live if simulate is None else bars.draw_simulated)(rows, png)


@app.command("round")
def measure_rounds(
    pairs: Annotated[str, typer.Option(help="Of models, target and drafter; see the names after `random:`.")] = (
        "llama-8b+llama-1b,qwen3-32b+qwen3-0.6b"
    ),
    batch: Annotated[str, typer.Option(help="Numbers of requests.")] = "1,8,64",
    steps: Annotated[str, typer.Option(help="Numbers of drafts of a round.")] = "1,4",
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="How often a guess is right.")] = 0.8,
    rounds: Annotated[int, typer.Option(min=2, help="Of each cell.")] = 60,
    early: Early = True,
    overrides: Overrides = None,
    png: Png = None,
    json: Json = None,
) -> None:
    """Tokens per second of rounds with target and drafter on one GPU, over plain decoding, with random weights; how
    long the GPU is idle; and the same where each round is read before the next is launched."""
    from distspec.bench import round as rounds_of
    from distspec.bench.policies import counts
    from distspec.bench.report import report
    from distspec.config import load

    requests, drafts = counts("batch", batch), counts("steps", steps)
    options = load("local", overrides or ()).engine
    with _launches(early):
        rows = rounds_of.measure(pairs.split(","), requests, drafts, acceptance, rounds, options)
    report(rows, json, rounds_of.FIGURES)
    if png is not None:
        from distspec.bench import bars

        bars.draw_rounds(rows, png)


@app.command("asked")
def measure_asked(
    pairs: Annotated[str, typer.Option(help="Of models with one vocabulary, target and drafter.")] = (
        "random:llama-8b+random:llama-1b"
    ),
    asks: Annotated[str, typer.Option(help="json: a schema, 16 rows. chain: penalties to logprobs, 64 rows.")] = (
        "json,chain"
    ),
    steps: Annotated[str, typer.Option(help="Numbers of drafts of a round, beside none.")] = "4",
    rounds: Annotated[int, typer.Option(min=2, help="Of each run.")] = 40,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turn; medians count.")] = 3,
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Milliseconds of a round whose rows ask for constraints, or for penalties, limits and logprobs, over those of a
    round whose rows do not. On a GPU where there is one."""
    from distspec.bench import asked
    from distspec.bench.policies import counts
    from distspec.bench.report import report
    from distspec.config import load

    options, drafts = load("local", overrides or ()).engine, counts("steps", steps)
    report(asked.measure(pairs.split(","), asks.split(","), drafts, rounds, repetitions, options), json, asked.FIGURES)


@app.command("transfer")
def measure_transfers(
    shape: Annotated[str, typer.Option(help="Of a model; see the names after `random:`.")] = "llama-8b",
    kinds: Annotated[str | None, typer.Option(help="As transfer. [ipc,nccl; with --cpu gloo]")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of a prompt.")] = 4096,
    repetitions: Annotated[int, typer.Option(min=1, help="Prompts of each kind; medians count.")] = 7,
    cpu: Annotated[bool, typer.Option("--cpu", help="Between two processes without GPUs.")] = False,
    overrides: Overrides = None,
    png: Png = None,
    json: Json = None,
) -> None:
    """GB/s of a prompt's KV between two workers on two GPUs, over that of their bare link; and how many milliseconds of
    it are left when the prompt is computed, over those of the whole."""
    from distspec.bench.report import report
    from distspec.bench.transfer import measure
    from distspec.config import load

    chosen = (kinds or ("gloo" if cpu else "ipc,nccl")).split(",")
    report(measure(shape, chosen, tokens, repetitions, load("local", overrides or ()).engine, gpus=not cpu), json)


def _launches(early: bool) -> AbstractContextManager[None]:
    """Within, launches are early or they are not."""
    if early:
        return nullcontext()
    from distspec.kernels.launch import one_by_one

    return one_by_one()


def _or(text: str | None, default: str) -> str:
    return default if text is None else text


def _refuse_simulated(**options: str | bool | None) -> None:
    for name, value in options.items():
        if value not in (None, False):
            raise typer.BadParameter("goes with --simulate", param_hint=f"--{name}")


def _live(
    config: str,
    overrides: list[str] | None,
    address: str | None,
    batches: list[int],
    kind: str,
    tokens: int,
    repetitions: int,
) -> list[Row]:
    """On a fleet of its own; what it cannot run, and how far it is, is said on stderr."""
    from distspec.bench import live
    from distspec.bench.prompts import prompts
    from distspec.config import load

    asked = load(config, overrides or ())
    say = partial(typer.echo, err=True)
    for name, reason in live.choices(asked)[1].items():
        say(f"without {name}: {reason}")
    plan = live.Plan(batches, prompts(kind, asked.model.name), kind, tokens, repetitions)
    return live.measure(asked, plan, address=address, say=say)
