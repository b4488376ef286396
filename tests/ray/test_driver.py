"""A fleet from a script: the same answers in every way of asking, and the driver scripts that ship."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from distspec import Fleet
from distspec.errors import ConfigError, FleetError, InvalidField
from distspec.serving.text import Detokenizer, Text
from distspec.workers import fleet as fleets
from tests.ray.worded import CONTEXT, save_worded_model
from tests.stops import reference_end
from tests.words import byte_level

DRIVERS = Path(__file__).parents[2] / "deploy" / "drivers"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    save_worded_model(folder / "model")
    tree = {
        "name": "driver",
        "model": {"name": str(folder / "model"), "max_model_len": CONTEXT},
        "engine": {"num_pages": 160, "max_num_seqs": 4, "num_threads": 1},
        "speculation": {"placement": "local"},
        "coordinator": {"max_queued_requests": 3, "heartbeat_s": 0.2, "lease_s": 10.0},
    }
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def fleet(cluster: None, config: Path) -> Iterator[Fleet]:
    with Fleet(config) as fleet:
        yield fleet
    fleets.shutdown("driver")


@pytest.fixture(scope="module")
def address(cluster: None) -> str:
    return str(ray.get_runtime_context().gcs_address)


async def test_every_way_of_asking_gives_the_same_answer(fleet: Fleet) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "seed": 4, "ignore_eos": True}
    [whole] = await fleet.agenerate("the quick", **asked)
    async with aclosing(fleet.astream("the quick", policy="ar", **asked)) as chunks:
        streamed = [chunk async for chunk in chunks]
    assert tuple(token for chunk in streamed for token in chunk.token_ids) == whole.token_ids
    assert whole.stats.policy == "sd"
    assert streamed[-1].stats is not None
    assert streamed[-1].stats.policy == "ar"
    assert len(whole.token_ids) == 40


def test_more_prompts_than_the_fleet_queues_are_all_answered(fleet: Fleet) -> None:
    prompts = [f"prompt {i}" for i in range(25)]
    answers = fleet.generate(prompts, max_tokens=12, seed=2)
    assert len(answers) == 25
    [alone] = fleet.generate(prompts[17], max_tokens=12, seed=2)
    assert answers[17].token_ids == alone.token_ids


def test_statistics_add_up(fleet: Fleet) -> None:
    [answer] = fleet.generate("0 1 2 0 1 2 0 1 2", max_tokens=60, temperature=0, ignore_eos=True)
    stats = answer.stats
    assert stats.completion_tokens == len(answer.token_ids) == 60
    assert stats.rounds
    assert stats.drafted is not None
    assert stats.accepted is not None
    assert stats.tokens_per_round == 60 / stats.rounds
    assert stats.accepted <= stats.drafted
    assert all(0 <= share <= 1 for share in stats.acceptance_by_position or ())


@pytest.mark.parametrize("policy", ["ar", "sd"])
def test_a_stop_ends_an_answer_exactly_there(fleet: Fleet, policy: str) -> None:
    """String or token, wherever in an accepted run; text, token ids and usage agree, and max_tokens may come first."""
    text = Text(byte_level())
    asked: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True, "policy": policy}
    [whole] = fleet.generate("0 1 2 0 1 2", **asked)
    if policy == "sd":
        assert max(whole.stats.tokens_per_round or 0, 1) > 1.5, "no run is long enough to be cut"
    pieces = [*map(Detokenizer(text).push, whole.token_ids)]
    for at in range(5, 45, 8):
        stop = "".join(pieces)[at : at + 3]
        cut, count, _ = reference_end(pieces, [stop], 0, False)
        for include, wanted in ((False, cut), (True, cut + stop)):
            [answer] = fleet.generate("0 1 2 0 1 2", **asked, stop=stop, include_stop_str_in_output=include)
            assert (answer.text, answer.token_ids, answer.finish_reason) == (wanted, whole.token_ids[:count], "stop")
            assert answer.stats.completion_tokens == count
            assert answer.stats.rounds
            assert answer.stats.policy == policy
        [both] = fleet.generate("0 1 2 0 1 2", **(asked | {"max_tokens": count}), stop=stop)
        assert (both.text, both.token_ids, both.finish_reason) == (cut, whole.token_ids[:count], "stop")
        token = whole.token_ids[at]
        count = whole.token_ids.index(token) + 1
        [answer] = fleet.generate("0 1 2 0 1 2", **asked, stop_token_ids=[token])
        assert (answer.token_ids, answer.finish_reason) == (whole.token_ids[:count], "stop")
        assert answer.text == text.decode(whole.token_ids[: count - 1])
        assert answer.stats.completion_tokens == count


@pytest.mark.parametrize("policy", ["ar", "sd"])
def test_logprobs_end_where_the_answer_does(fleet: Fleet, policy: str) -> None:
    """Nor do they depend on the policy; streamed ones come with their tokens."""
    asked: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True, "logprobs": 3, "echo": True}
    [whole] = fleet.generate("0 1 2 0 1 2", **asked, prompt_logprobs=1, policy="ar")
    assert len(whole.logprobs) == len(whole.token_ids) == len(whole.offsets)
    assert len(whole.prompt.logprobs) == len(whole.prompt.token_ids) - 1
    assert whole.text.startswith("0 1 2 0 1 2")
    stop = whole.text[whole.offsets[20] :][:3]
    chunks = list(fleet.stream("0 1 2 0 1 2", **asked, stop=stop, policy=policy))
    found = [said for chunk in chunks for said in chunk.logprobs]
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    assert 0 < len(tokens) == len(found) < 48
    assert tokens == whole.token_ids[: len(tokens)]
    for said, right in zip(found, whole.logprobs, strict=False):
        assert said.logprob == pytest.approx(right.logprob, abs=1e-4)
        assert [token for token, _ in said.top] == [token for token, _ in right.top]
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.completion_tokens == len(tokens)


def test_nothing_stops_before_min_tokens(fleet: Fleet) -> None:
    text = Text(byte_level())
    asked: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    [whole] = fleet.generate("0 1 2 0 1 2", **asked)
    pieces = [*map(Detokenizer(text).push, whole.token_ids)]
    for stop, least in product({whole.text[0], whole.text[20], whole.text[-1]}, (1, 10, 30)):
        cut, count, stopped = reference_end(pieces, [stop], least, False)
        [answer] = fleet.generate("0 1 2 0 1 2", **asked, stop=stop, min_tokens=least)
        assert (answer.text, answer.token_ids) == (cut, whole.token_ids[:count])
        assert answer.finish_reason == ("stop" if stopped else "length")
        token = whole.token_ids[least - 1]
        answers = [
            fleet.generate("0 1 2 0 1 2", **asked, stop_token_ids=[token], min_tokens=least, policy=policy)[0]
            for policy in ("ar", "sd")
        ]
        assert token not in answers[0].token_ids[:least]
        assert len(answers[0].token_ids) > least
        assert answers[0].token_ids == answers[1].token_ids


def test_errors_name_the_field(fleet: Fleet) -> None:
    with pytest.raises(InvalidField, match=rf"^prompt: .*at most {CONTEXT - 1} tokens"):
        fleet.generate([[1] * CONTEXT])
    with pytest.raises(InvalidField, match=r"^speculation\.policy: "):
        fleet.generate("a", policy="warp")


def test_what_cannot_run_is_said_at_once(cluster: None, config: Path, fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"pools\.decod"):
        Fleet(config, ["pools.decod.replicas=1"])
    term = fleet.status()["term"]
    with pytest.raises(FleetError, match="runs already with another configuration"):
        Fleet(config, ["engine.page_size=32"]).start()
    with Fleet(config, ["server.port=9", "server.default_max_tokens=3"]) as other:
        assert len(other.generate("a", ignore_eos=True)[0].token_ids) == 3
    assert fleet.status()["term"] == term, "whoever came or did not fit ended the fleet of the others"


def test_policies_agree_by_the_script_that_ships(fleet: Fleet, config: Path, address: str) -> None:
    done = _script("compare_policies.py", "--config", str(config), "--address", address, "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert "dsi" in done.stdout


def test_a_file_of_prompts_is_answered_and_an_interrupted_run_goes_on(
    fleet: Fleet, config: Path, address: str, tmp_path: Path
) -> None:
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    lines = ["the fox", '{"prompt": "dog", "n": 2}', '[{"role": "user", "content": "hi"}]', '{"prompt": ""}', "last"]
    prompts.write_text("\n".join(lines))
    options = ("--config", str(config), "--address", address, "--max-tokens", "6", "--seed", "1")
    done = _script("batch_generate.py", str(prompts), str(answers), *options)
    assert done.returncode == 1, done.stderr  # one prompt is empty
    written = answers.read_text()
    rows = [json.loads(line) for line in written.splitlines()]
    assert [len(row.get("answers", ())) for row in rows] == [1, 2, 1, 0, 1]
    assert "prompt" in rows[3]["error"]
    kept = written.splitlines(keepends=True)[:2]
    answers.write_text("".join(kept) + '{"half a li')
    _script("batch_generate.py", str(prompts), str(answers), *options)
    again = [json.loads(line) for line in answers.read_text().splitlines()]
    tokens = [[answer["token_ids"] for answer in row.get("answers", ())] for row in rows]
    assert [[answer["token_ids"] for answer in row.get("answers", ())] for row in again] == tokens


def _script(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRIVERS / name), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
