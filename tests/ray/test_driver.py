"""A fleet from a script: the same answers in every way of asking, and the driver scripts that ship."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import ray
import yaml

from distspec import Fleet
from distspec.errors import ConfigError, FleetError, InvalidField
from distspec.workers import fleet as fleets
from tests.ray.worded import CONTEXT, save_worded_model

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
    asked = {"max_tokens": 40, "seed": 4, "ignore_eos": True}
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


def test_an_answer_that_a_stop_string_ends_has_statistics_too(fleet: Fleet) -> None:
    [whole] = fleet.generate("0 1 2 0 1 2", max_tokens=60, seed=1, ignore_eos=True)
    stop = whole.text[len(whole.text) // 2 :][:4]
    [answer] = fleet.generate("0 1 2 0 1 2", max_tokens=60, seed=1, ignore_eos=True, stop=stop)
    assert answer.finish_reason == "stop"
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert answer.stats.rounds
    assert answer.stats.policy == "sd"


def test_errors_name_the_field(fleet: Fleet) -> None:
    with pytest.raises(InvalidField, match=r"^prompt: .*at most 511 tokens"):
        fleet.generate([[1] * CONTEXT])
    with pytest.raises(InvalidField, match=r"^speculation\.policy: "):
        fleet.generate("a", policy="warp")


def test_what_cannot_run_is_said_at_once(cluster: None, config: Path, fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"pools\.decod"):
        Fleet(config, ["pools.decod.replicas=1"])
    term = fleet.status()["term"]
    with pytest.raises(FleetError, match="runs already with another configuration"):
        Fleet(config, ["engine.page_size=8"]).start()
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
