"""The newcomer's path: `distspec serve` on the default model, asked with curl and by the other commands."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.needs("model", "linux"), pytest.mark.timeout(600)]

CLUSTER = """
from distspec.cli.serve import _until_interrupted
from distspec.serving.cluster import cluster
import time
with _until_interrupted(), cluster():
    print("up", flush=True)
    time.sleep(100)
"""
DISTSPEC = [sys.executable, "-c", "from distspec.cli import main; main()"]


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    ray_address: str
    mark: str
    log: Path

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [*DISTSPEC, *args, "--address", self.ray_address]
        # Ray's own default when it starts a cluster, but not when an address is named.
        environment = {"RAY_AUTH_MODE": "token", **os.environ}
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)


def marked(mark: str) -> list[str]:
    """Command lines of the processes that carry the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " ")[:80])
        except OSError:
            continue
    return found


def wait_until_gone(mark: str) -> None:
    for _ in range(600):
        if not (left := marked(mark)):
            return
        time.sleep(0.1)
    pytest.fail(f"still running: {left}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mark, log = uuid.uuid4().hex, tmp_path_factory.mktemp("serve") / "log"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*DISTSPEC, "serve", "--port", str(port), "engine.num_threads=1"],
            stdout=out,
            stderr=out,
            env={**environment, "DISTSPEC_TEST_MARK": mark},
            start_new_session=True,
        )
    try:
        while not (ready := re.search(r"Ray is at ([\w.:]+);", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield Server(process, f"http://127.0.0.1:{port}", ready.group(1), mark, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_what_tries_constraints_is_there_before_anybody_asks(server: Server) -> None:
    assert any("distspec.constraints.trial" in line for line in marked(server.mark))


def test_a_second_server_is_refused_by_what_is_taken_and_the_first_goes_on(server: Server) -> None:
    """Its port on this machine; on the same cluster, another port than Serve's, and Serve's path."""
    port = server.url.rpartition(":")[2]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [*DISTSPEC, "serve", "--port", port]
    here = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
    elsewhere = server.run("serve", "--port", "9", "name=second")
    path = server.run("serve", "--port", port, "name=second")
    for done, says, status in (
        (here, f"server.port: got {port}, need a free one on 127.0.0.1", 2),
        (elsewhere, f"server.port: got 9, need {port}", 2),
        (path, 'Prefix / is being used by application "local"', 1),
    ):
        assert done.returncode == status, done.stderr
        assert says in done.stderr
        assert "Traceback" not in done.stderr
    assert httpx.get(f"{server.url}/health", timeout=60).json() == {"status": "ok"}
    assert "second" not in server.run("status").stderr


def test_it_answers_in_english(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "temperature": 0}, timeout=120)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.needs("curl")
def test_curl_streams_the_same(server: Server) -> None:
    body: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d"]
    done = subprocess.run([*command, json.dumps(body | {"stream": True})], capture_output=True, text=True, check=True)
    *events, last = [event.removeprefix("data: ") for event in done.stdout.split("\n\n") if event]
    assert last == "[DONE]"
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


def test_generate_prints_one_object_and_nothing_else(server: Server) -> None:
    asked = ("--prompt", "Name a river.", "--max-tokens", "8", "--temperature", "0", "--seed", "3", "--chat")
    done = server.run("generate", *asked, "--policy", "ar", "--json", "engine.num_threads=1")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert answer.keys() >= {"text", "token_ids", "finish_reason", "stats"}
    assert answer["stats"].keys() >= {
        "rounds",
        "tokens_per_round",
        "accepted",
        "drafted",
        "acceptance_by_position",
        "time_to_first_token_s",
        "time_per_output_token_s",
    }
    assert answer["stats"]["policy"] == "ar"
    assert len(answer["token_ids"]) <= 8


def test_generate_streams_to_the_terminal(server: Server) -> None:
    done = server.run("generate", "--prompt", "Once upon a time", "--max-tokens", "6", "engine.num_threads=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "6 tokens, first after" in done.stderr


def test_a_bad_request_is_an_error_message(server: Server) -> None:
    done = server.run("generate", "--prompt", "a", "--policy", "warp", "--json", "engine.num_threads=1")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("need one of ar, sd, pearl, dsi, ssd, bvsp, auto")
    assert not done.stdout


def test_status_and_trace(server: Server, tmp_path: Path) -> None:
    status = server.run("status")
    assert status.returncode == 0, status.stderr
    assert all(worker in status.stdout for worker in ("prefill:0", "decode:0", "verify:0", "draft:0"))
    trace = server.run("trace", "--out", str(tmp_path / "trace.json"), "--out", str(tmp_path / "life.png"))
    assert trace.returncode == 0, trace.stderr
    assert (tmp_path / "life.png").read_bytes().startswith(b"\x89PNG")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert names >= {"prefill", "decode"}


@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGINT, "while Ray starts"), (signal.SIGINT, "later"), (signal.SIGTERM, "later")]
)
def test_a_signal_ends_a_cluster_of_ones_own_whole(number: signal.Signals, when: str) -> None:
    """Ray's own handler of SIGTERM would end the process in the midst of things; while Ray starts, it does."""
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**environment, "DISTSPEC_TEST_MARK": mark}
    ) as process:
        assert process.stdout is not None
        if when == "later":
            process.stdout.readline()
        while len(marked(mark)) < 2:  # the first of Ray's own
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
    wait_until_gone(mark)


def test_ctrl_c_leaves_nothing_behind(server: Server) -> None:
    """Runs last: it ends the server. An answer is under way, for which a second one does not wait."""
    assert any("raylet" in line for line in marked(server.mark))
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        next(answer.iter_bytes())
        server.process.send_signal(signal.SIGINT)
        while "stopping;" not in server.log.read_text():
            time.sleep(0.1)
        time.sleep(1)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=60) == 0, server.log.read_text()
    assert "stopping at once" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()
    wait_until_gone(server.mark)
