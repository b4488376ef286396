"""Attention over paged KV: one interface, siblings that implement it, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import PathFinder

import torch

from distspec.attention.base import AttentionBackend, Bucket, Span, StaticPlans
from distspec.errors import InvalidValue

__all__ = ["BACKENDS", "AttentionBackend", "Bucket", "Span", "StaticPlans", "choose"]


def _sdpa() -> type[AttentionBackend]:
    from distspec.attention.sdpa import SdpaBackend

    return SdpaBackend


def _triton() -> type[AttentionBackend]:
    from distspec.attention.triton import TritonBackend

    return TritonBackend


BACKENDS: dict[str, Callable[[], type[AttentionBackend]]] = {"sdpa": _sdpa, "triton": _triton}
"""Each imports its own: not every machine has the packages of all."""


def choose(name: str, device: torch.device, dtype: torch.dtype) -> tuple[type[AttentionBackend], str]:
    """The backend that `name` stands for here, and why. name: `auto` or a key of BACKENDS.

    Raises InvalidValue for one that is configured and cannot run here.
    """
    missing = _missing_for_triton(device)
    if name == "auto":
        return (_sdpa(), f"sdpa: {missing}") if missing else (_triton(), "triton: trees, chains and splits in one call")
    if name == "triton" and missing:
        raise InvalidValue("engine.attention_backend", name, f"sdpa: {missing}")
    return BACKENDS[name](), f"{name}: configured"


def _missing_for_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot run here; None if they can."""
    if device.type != "cuda":
        return f"Triton kernels need CUDA, the device is {device.type}"
    if PathFinder.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton kernels need compute capability 8.0"
    return None
