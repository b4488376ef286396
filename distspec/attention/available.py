"""What attention backends need of a machine, and what of it is missing here.

Knows packages by name and devices by their capability. Imports no backend of ours: not every machine could.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import PathFinder

import torch


def missing_for_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot run here; None if they can."""
    if device.type != "cuda":
        return f"Triton kernels need CUDA, the device is {device.type}"
    if PathFinder.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton kernels need compute capability 8.0"
    return None


def flash_package() -> str | None:
    """Name of the package that could be imported. Imports nothing: vllm takes seconds."""
    vllm = PathFinder.find_spec("vllm")
    inside = vllm.submodule_search_locations if vllm is not None else None
    if inside and PathFinder.find_spec("vllm_flash_attn", list(inside)) is not None:
        return "vllm.vllm_flash_attn"
    return "vllm_flash_attn" if PathFinder.find_spec("vllm_flash_attn") is not None else None


def missing_for_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashAttention cannot run here; None if it can."""
    if device.type != "cuda":
        return f"FlashAttention needs CUDA, the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention needs float16 or bfloat16, the dtype is {dtype}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "FlashAttention needs compute capability 8.0"
    if flash_package() is None:
        return "neither vllm.vllm_flash_attn nor vllm_flash_attn is installed"
    return missing_for_triton(device)


def missing_for_flashinfer(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot run here; None if it can. Imports it, which takes seconds: parts of it may be missing."""
    if device.type != "cuda":
        return f"FlashInfer needs CUDA, the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer needs float16 or bfloat16, the dtype is {dtype}"
    if lacks := missing_for_triton(device):
        return lacks
    try:
        import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        return f"flashinfer does not import: {error}"
    return None
