"""What every test shares: the marker `needs`, and how tests are spread over processes.

`@pytest.mark.needs("curl", "gpu")` names what a test cannot do without. Where it is missing the test is
skipped and says so; where the environment's REQUIRE names it (as .ci/run does), it fails instead, so that a
green run there means that the test ran.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A test states what holds, not how fast this machine is while others use it.
hypothesis.settings.register_profile("distspec", deadline=None)
hypothesis.settings.load_profile("distspec")

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes that tests are spread over share the cores, and a thread of one would spin while another's has its core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton looks when it is first imported. Where there is a GPU its kernels are tested by tests/gpu, compiled.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _gpus(count: int) -> str | None:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return None if found >= count else f"{count} CUDA device(s) needed, {found} found"


def _model() -> str | None:
    from distspec.errors import ModelNotFound
    from distspec.models import model_folder

    try:
        model_folder("smollm2-135m")
    except ModelNotFound as error:
        return str(error)
    return None


def _linux() -> str | None:
    return None if sys.platform == "linux" else f"Linux needed, this is {sys.platform}"


def _root() -> str | None:
    return None if os.geteuid() == 0 else "root needed"


def _interpreter() -> str | None:
    return None if os.environ.get("TRITON_INTERPRET") == "1" else "Triton's interpreter needed, kernels are compiled"


def _flash() -> str | None:
    from distspec.attention.available import flash_package

    return None if flash_package() else "vllm.vllm_flash_attn or vllm_flash_attn needed"


def _flashinfer() -> str | None:
    import torch

    from distspec.attention.available import missing_for_flashinfer

    return missing_for_flashinfer(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.bfloat16)


PROBES: dict[str, Callable[[], str | None]] = {
    "flash": _flash,
    "flashinfer": _flashinfer,
    "gpu": lambda: _gpus(1),
    "gpu2": lambda: _gpus(2),
    "interpreter": _interpreter,
    "linux": _linux,
    "model": _model,
    "root": _root,
}


@cache
def missing(name: str) -> str | None:
    """Why `name` is missing here, or None. A name without a probe of its own is a program on the PATH."""
    probe = PROBES.get(name)
    if probe is not None:
        return probe()
    return None if shutil.which(name) else f"{name} is not on the PATH"


def required() -> set[str]:
    return set(os.environ.get("REQUIRE", "").split())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.together import Together  # hosts with a GPU may have no xdist

    return Together(config, log) if config.getvalue("dist") == "load" else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*names): skipped with its reason where one of them is missing")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            reason = missing(name)
            if reason is None:
                continue
            if name in required():
                pytest.fail(f"REQUIRE names {name}: {reason}", pytrace=False)
            pytest.skip(reason)
