"""A process that CUDA serves no more says so, before it is given requests again."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs("gpu")

BROKEN = """
import torch
from distspec.workers.assembly.parts import prove

device = torch.device("cuda")
prove(device)
try:
    torch.zeros(2, device=device)[torch.tensor([5], device=device)].tolist()
except RuntimeError:
    pass
try:
    prove(device)
except RuntimeError as error:
    print("lost:", error, flush=True)
"""


def test_after_a_wrong_address_a_process_cannot_prove_that_its_device_computes() -> None:
    """In a process of its own, which is lost then."""
    ran = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=300)
    assert "lost:" in ran.stdout, ran.stderr
