"""Serve's own command line starts the application on a cluster that runs, and ends it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation

from distspec.workers import fleet as fleets
from tests.ray.worded import CONTEXT, save_worded_model

INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""Serve leaves SIGINT as it was inherited, and whoever started these tests in the background had it ignored."""
SERVE = [sys.executable, "-c", f"{INTERRUPTIBLE}; from ray.serve.scripts import cli; cli()"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    save_worded_model(tmp_path / "model")
    tree = {
        "name": "serve-run",
        "model": {"name": str(tmp_path / "model"), "max_model_len": CONTEXT, "served_name": "tiny"},
        "engine": {"num_pages": 160, "max_num_seqs": 4, "num_threads": 1},
        "speculation": {"placement": "local"},
        "coordinator": {"heartbeat_s": 0.2, "lease_s": 3.0},
    }
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def url(cluster: None) -> Iterator[str]:
    """Serve on a free port; the command line finds it running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host="127.0.0.1", port=port))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    fleets.shutdown("serve-run")


def test_serve_run_answers_and_ends(url: str, config: Path, tmp_path: Path) -> None:
    address = str(ray.get_runtime_context().gcs_address)
    root = Path(__file__).parents[2]
    command = [*SERVE, "run", "--address", address, "--app-dir", str(root), "distspec.serving:app", f"config={config}"]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        while not _healthy(url):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        process.send_signal(signal.SIGINT)
        process.wait(60)
        while any(actor["name"].startswith("serve-run:") for actor in ray.util.list_named_actors(all_namespaces=True)):
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
