"""What answers without a cluster: help, configurations, journals. And that it answers at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from distspec.config import Server, load, named
from distspec.coordinator.context import Settings
from distspec.coordinator.events import Tick
from distspec.coordinator.journal import Journal
from distspec.coordinator.machine import Machine
from distspec.protocol.messages import Cancel


def run(
    *args: str, code: str = "from distspec.cli import main; main()", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-c", code, *args], {**os.environ, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)


@pytest.mark.parametrize("name", named())
def test_check_prints_what_loads_to_the_same_configuration(name: str) -> None:
    done = run("check", name, "pools.verify.replicas=2")
    assert done.returncode == 0, done.stderr
    assert load(yaml.safe_load(done.stdout)) == load(name, ["pools.verify.replicas=2"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["local", "pools.verfy.replicas=2"], "pools.verfy: unknown key; did you mean pools.verify?"),
        (["local", "engine.page_size=0"], "engine.page_size"),
        (["nowhere"], "nowhere is no file and no shipped configuration"),
    ],
)
def test_check_names_the_key_at_fault(args: list[str], says: str) -> None:
    done = run("check", *args)
    assert done.returncode == 2
    assert says in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("args", "option", "suffix"),
    [
        (["trace", "--out", "life.json", "--out"], "out", ".gif"),
        (["trace", "--out"], "out", "/none/life.png"),
        (["bench", "policies", "--json"], "json", "/none/rows.json"),
        (["bench", "policies", "--json"], "json", ""),
        (["bench", "policies", "--png"], "png", ".gif"),
        (["bench", "round", "--png"], "png", "/none/rows.png"),
        (["bench", "overhead", "--json"], "json", "/none/rows.json"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    args: list[str], option: str, suffix: str, tmp_path: Path
) -> None:
    done = run(*args, f"{tmp_path}{suffix}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {option}: got '{tmp_path}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--batch", ""], "batch"),
        (["--batch", "inf"], "batch"),
        (["--verifiers", "1.5"], "verifiers"),
        (["--acceptance", ""], "acceptance"),
        (["--synthetic", "0.8,0.5"], "synthetic"),
        (["--acceptance", "0.5", "--synthetic", "0.8,0.1"], "synthetic"),
    ],
)
def test_numbers_that_cannot_be_simulated_are_refused(args: list[str], option: str) -> None:
    done = run("bench", "policies", "--simulate", "h200-32b-0.6b", *args)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {option}: got ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["round", "--pairs", "llama-8b"], "pairs: got 'llama-8b', need a target and a drafter"),
        (["asked", "--asks", "xml"], "asks: got 'xml', need some of json, chain"),
        (["transfer", "--cpu", "--kinds", "ipc"], "kinds: got 'ipc', need some of gloo"),
        (["transfer", "--cpu", "--shape", "nope"], "model 'random:nope' not found; looked in: shapes"),
        (["acceptance", "--model", "no model"], "model 'no model' not found"),
    ],
)
def test_a_bench_of_what_there_is_not_is_refused(args: list[str], says: str) -> None:
    done = run("bench", *args)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["serve", "--help"], ["generate", "--help"], ["trace", "--help"], ["check", "local"]],
)
def test_what_needs_no_cluster_imports_none(args: list[str]) -> None:
    code = (
        "import sys\nfrom distspec.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    heavy = {'ray', 'torch', 'transformers', 'fastapi', 'matplotlib'}\n"
        "    print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    done = run(*args, code=code)
    assert "heavy: []" in done.stdout, done.stdout + done.stderr


def test_help_names_the_defaults_of_the_configuration() -> None:
    done = run("serve", "--help", environment={"COLUMNS": "200"})
    assert f"server.host. [{Server().host}]" in done.stdout
    assert f"server.port. [{Server().port}]" in done.stdout


def test_the_version_is_that_of_the_package() -> None:
    done = run("--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{version('distspec')}\n"


def test_importing_the_package_is_light() -> None:
    done = run(code="import sys, distspec; print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))")
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("named", ["--address", "RAY_ADDRESS"])
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_is_gone_is_said_and_not_waited_for(named: str, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        address = f"{scheme}127.0.0.1:{once.getsockname()[1]}"
    done = run("status", environment={named: address}) if named == "RAY_ADDRESS" else run("status", named, address)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Ray cluster at ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:port", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_an_error_message(address: str) -> None:
    done = run("status", "--address", address)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    machine = Machine(Settings(), 3)
    writer = Journal(path, 1_000_000, Settings(), 3)
    for now in range(5):
        writer.write(float(now), Tick(), machine.handle(Tick(), float(now)))
    writer.close()
    return path


def test_replay_agrees_with_the_journal(journal: Path) -> None:
    done = run("replay", str(journal))
    assert done.returncode == 0, done.stderr
    assert "term 3: 5 events" in done.stdout


def test_replay_shows_where_it_differs(journal: Path, tmp_path: Path) -> None:
    path = tmp_path / "other"
    writer = Journal(path, 1_000_000, Settings(), 3)
    writer.write(0.0, Tick(), [])
    writer.write(1.0, Tick(), [Cancel(key="x")])  # type: ignore[list-item]
    writer.close()
    done = run("replay", str(path))
    assert done.returncode == 1
    assert "event 1 at 1.000000 s led to other commands" in done.stderr


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), (b"", "is no journal"), (b"\xc1\xff", "damaged")]
)
def test_replay_says_what_is_wrong_with_a_file(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "journal"
    if content is not None:
        path.write_bytes(content)
    done = run("replay", str(path))
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
