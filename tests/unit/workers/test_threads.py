"""How long OpenMP's threads spin is set for torch to find, unless the operator has said how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distspec.workers.threads import spin_briefly


@pytest.mark.parametrize(
    ("operators", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_the_operators_word_stands(
    operators: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that whatever is set below is undone
        monkeypatch.delenv(name)
    for name, value in operators.items():
        monkeypatch.setenv(name, value)
    spin_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_torch_is_not_imported_before_a_worker_is_built() -> None:
    script = (
        "import sys, distspec.workers.worker, distspec.workers.threads, distspec.bench; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
