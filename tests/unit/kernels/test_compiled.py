"""What the interpreter computes in other tests can be compiled for a GPU, too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.needs("linux")
def test_every_kernel_compiles() -> None:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.compiled"], env=compiling, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
