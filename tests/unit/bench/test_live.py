"""What rows of a fleet's policies say, from streams and counters as a run leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from distspec.bench.bars import draw_live
from distspec.bench.live import Counted, Plan, Run, Stream, choices, pace, rows
from distspec.bench.prompts import CHAT, COPY, prompts
from distspec.cli.bench import app
from distspec.config import load
from distspec.coordinator import events
from distspec.coordinator.context import Settings
from distspec.coordinator.machine import Machine
from distspec.coordinator.observe import Observer
from distspec.errors import InvalidValue
from distspec.protocol.messages import Drafted, Progress, Verdict
from distspec.protocol.values import ROOT, Usage
from distspec.trace import Trace

PLAN = Plan([2], prompts("4", "random:llama-1b"), "chat", tokens=11, repetitions=3)
NOTHING = Counted(0.0, 0.0, 0.0)


def stream(begin_s: float, each_s: float, tokens: Sequence[int], usage: Usage = Usage()) -> Stream:  # noqa: B008
    return Stream(list(tokens), [(begin_s + i * each_s, 1) for i in range(len(tokens))], usage)


def run(each_s: float, tokens: Sequence[int] = range(11)) -> Run:
    return Run([stream(0.0, each_s, tokens)] * 2, 1.0, NOTHING, NOTHING)


# -- which policies --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "able", "refused"),
    [
        ([], "ar sd sd112 pearl dsi ssd bvsp auto", {}),
        (["pools.verify.replicas=0"], "ar sd sd112 pearl dsi ssd auto", {"bvsp": "second target"}),
        (
            ["speculation.placement=local", "speculation.allowed_policies=[sd, dsi, ar]"],
            "ar sd sd112",
            {"dsi": "placement", "ssd": "allowed_policies", "auto": "allowed_policies"},
        ),
        (["speculation.topk=2"], "ar sd pearl dsi ssd bvsp auto", {"sd112": "topk is 2"}),
        (["speculation.drafter=none", "speculation.policy=ar", "pools.draft.replicas=0"], "ar", {}),
    ],
)
def test_what_a_fleet_can_run_is_told_from_what_it_cannot(
    overrides: list[str], able: str, refused: dict[str, str]
) -> None:
    found, why = choices(load("local", overrides))
    assert " ".join(choice.name for choice in found) == able
    assert all(part in why[name] for name, part in refused.items())
    assert not {choice.name for choice in found} & why.keys()


def test_one_drafted_token_is_a_way_to_ask_for_sd() -> None:
    [choice] = [choice for choice in choices(load("local"))[0] if choice.name == "sd112"]
    assert (choice.policy, choice.steps) == ("sd", 1)


def test_without_ar_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(InvalidValue, match="ar, which all are compared with"):
        choices(load("local", ["speculation.allowed_policies=[sd]"]))


# -- rates -----------------------------------------------------------------------------------------


@given(st.floats(0.01, 10), st.integers(1, 5), st.integers(1, 50), st.floats(-1e3, 1e3), st.integers(1, 99))
def test_a_pace_is_that_of_what_follows_the_first_message(
    each_s: float, size: int, messages: int, shift_s: float, first: int
) -> None:
    arrivals = [(shift_s, first), *((shift_s + i * each_s, size) for i in range(1, messages + 1))]
    assert pace(arrivals) == pytest.approx(size / each_s)


def test_one_message_has_no_pace() -> None:
    with pytest.raises(InvalidValue, match="tokens"):
        pace([(1.0, 4)])


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_has_the_figures_of_its_median_repetition() -> None:
    usage = Usage(rounds=4, accepted=6, hits=1)
    config = load("local", ["pools.draft.replicas=2"])

    def once(each_s: float) -> Run:
        both = [stream(0.0, each_s, range(11), usage), stream(0.0, each_s, range(11), usage)]
        return Run(both, 10.0, Counted(1.0, 1.0, 100.0), Counted(13.0, 3.0, 124.0))

    plain = [run(0.5), run(0.5), run(0.25)]
    found = rows({"ar": plain, "sd": [once(0.2), once(0.1), once(0.25)]}, config, PLAN, 2, {})
    ar, sd = found
    assert (ar.name, sd.name) == ("policies/ar/b2/chat", "policies/sd/b2/chat")
    assert (ar.value, ar.reference, ar.ratio) == pytest.approx((4.0, 4.0, 1.0))
    assert (sd.value, sd.reference, sd.ratio) == pytest.approx((10.0, 4.0, 2.5))  # ratios 2.5, 5 and 1
    figures = {key: sd.context[key] for key in ("token_s", "accepted", "hits", "target_busy", "draft_busy", "wasted")}
    assert figures == pytest.approx(
        {"token_s": 0.2, "accepted": 1.5, "hits": 0.25, "target_busy": 0.6, "draft_busy": 0.1, "wasted": 0.5}
    )


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), st.floats(0.2, 5))
def test_what_slows_a_whole_repetition_changes_no_ratio(drift: list[float], speedup: float) -> None:
    runs = {"ar": [run(slow) for slow in drift], "sd": [run(slow / speedup) for slow in drift]}
    assert rows(runs, load("local"), PLAN, 2, {})[1].ratio == pytest.approx(speedup)


def test_tokens_that_differ_from_plain_decoding_show() -> None:
    other = [0, 1, 2, 3, 4, 99, 6, 7, 8, 9, 10]
    runs = {"ar": [run(0.1), run(0.1)], "sd": [run(0.1), run(0.1, other)]}
    assert [one.context["equal_tokens"] for one in rows(runs, load("local"), PLAN, 2, {})] == [1.0, (1 + 5 / 11) / 2]


def test_made_up_guesses_are_in_the_name() -> None:
    config = load("local", ["speculation.synthetic_acceptance=[0.8, 0.1]"])
    [one] = rows({"ar": [run(0.1)]}, config, PLAN, 2, {})
    assert one.name == "policies/ar/b2/chat/a0.8"


def test_counters_of_a_coordinator_are_read_by_role() -> None:
    machine, observer = Machine(Settings(), 1), Observer(Trace())
    for worker, message in (
        ("prefill:0", Verdict(request=1, epoch=0, task=1, outcomes=((ROOT, 5),), span=(0.0, 7.0))),
        ("decode:0", Verdict(request=1, epoch=0, task=2, outcomes=((ROOT, 5), (3, 6), (4, 7)), span=(1.0, 2.0))),
        ("verify:1", Verdict(request=1, epoch=0, task=3, outcomes=((4, 7),), span=(1.0, 3.0))),
        ("draft:0", Drafted(request=1, epoch=0, task=4, base=1, tokens=(), parents=(), span=(3.0, 3.5))),
        ("decode:0", Progress(request=2, epoch=0, start=1, tokens=(9,), drafting=(4.0, 4.25), span=(5.0, 6.0))),
    ):
        observer.handled(events.FromWorker(worker, 1, message), [], [], 0.0, 0.0)
    assert Counted.of(observer.metrics(machine.snapshot())) == Counted(target_s=4.0, drafter_s=0.75, judged=3)


def test_the_picture_has_every_figure(tmp_path: Path) -> None:
    found = rows({"ar": [run(0.1)], "sd": [run(0.1)]}, load("local"), PLAN, 2, {"model": "m", "drafter": "ngram"})
    draw_live(found, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


# -- asking ----------------------------------------------------------------------------------------


def test_random_prompts_are_all_different_and_the_same_every_time() -> None:
    one, same = prompts("12", "random:llama-1b"), prompts("12", "random:llama-1b")
    made = [tuple(one(i)) for i in range(-4, 60)]
    assert len(set(made)) == 64
    assert all(len(ids) == 12 and all(0 <= id < 128256 for id in ids) for ids in made)
    assert made == [tuple(same(i)) for i in range(-4, 60)]


def test_prompts_are_enough_and_all_different() -> None:
    assert len(CHAT) == len(set(CHAT)) == len(COPY) == len(set(COPY)) == 20


@pytest.mark.parametrize("kind", ["", "poem", "0", "-3"])
def test_unknown_prompts_are_refused(kind: str) -> None:
    with pytest.raises(InvalidValue, match="chat, copy"):
        prompts(kind, "random:llama-1b")


@pytest.mark.parametrize("option", ["--trees", "--verifiers=2", "--acceptance=0.5", "--synthetic=0.5"])
def test_options_of_the_simulator_are_not_ignored_without_it(option: str) -> None:
    result = CliRunner().invoke(app, ["policies", option])
    assert result.exit_code == 2
    assert "--simulate" in result.output


def test_a_batch_beyond_the_slots_is_refused_before_anything_starts() -> None:
    result = CliRunner().invoke(app, ["policies", "--batch", "64", "--prompts", "8", "model.name=random:llama-1b"])
    assert isinstance(result.exception, InvalidValue)
    assert "max_num_seqs" in str(result.exception)
