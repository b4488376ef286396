"""Attention over paged KV: one interface, siblings that implement it, and the choice between them."""

from __future__ import annotations

from importlib.machinery import PathFinder

import torch

from distspec.attention.base import AttentionBackend, Span
from distspec.attention.sdpa import SdpaBackend

BACKENDS: dict[str, type[AttentionBackend]] = {"sdpa": SdpaBackend}

__all__ = ["BACKENDS", "AttentionBackend", "Span", "choose"]


def choose(name: str, device: torch.device, dtype: torch.dtype) -> tuple[type[AttentionBackend], str]:
    """The backend that `name` stands for here, and why. name: `auto` or a key of BACKENDS."""
    if name != "auto":
        return BACKENDS[name], f"{name}: configured"
    if device.type != "cuda":
        return SdpaBackend, f"sdpa: flash kernels need CUDA, the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return SdpaBackend, f"sdpa: flash kernels need float16 or bfloat16, the dtype is {dtype}"
    found = _flash_package()
    if found is None:
        return SdpaBackend, "sdpa: neither vllm.vllm_flash_attn nor vllm_flash_attn is installed"
    return SdpaBackend, f"sdpa: {found} is installed, but no backend uses it yet"


def _flash_package() -> str | None:
    """Name of the flash attention package that could be imported. Imports nothing: vllm takes seconds."""
    vllm = PathFinder.find_spec("vllm")
    inside = vllm.submodule_search_locations if vllm is not None else None
    if inside and PathFinder.find_spec("vllm_flash_attn", list(inside)) is not None:
        return "vllm.vllm_flash_attn"
    return "vllm_flash_attn" if PathFinder.find_spec("vllm_flash_attn") is not None else None
