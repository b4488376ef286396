"""Attention over paged KV: one interface, siblings that implement it, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distspec.attention.available import missing_for_flash, missing_for_flashinfer, missing_for_triton
from distspec.attention.base import AttentionBackend, Bucket, DevicePlans, Places, Span, StaticPlans
from distspec.attention.sdpa import SdpaBackend
from distspec.errors import InvalidValue

__all__ = ["BACKENDS", "LATENT", "AttentionBackend", "Bucket", "DevicePlans", "Places", "Span", "StaticPlans", "choose"]


def _sdpa() -> type[AttentionBackend]:
    return SdpaBackend


def _triton() -> type[AttentionBackend]:
    from distspec.attention.triton import TritonBackend

    return TritonBackend


def _flash() -> type[AttentionBackend]:
    from distspec.attention.flash import FlashBackend

    return FlashBackend


def _flashinfer() -> type[AttentionBackend]:
    from distspec.attention.flashinfer import FlashInferBackend

    return FlashInferBackend


BACKENDS: dict[str, Callable[[], type[AttentionBackend]]] = {
    "flash": _flash,
    "flashinfer": _flashinfer,
    "sdpa": _sdpa,
    "triton": _triton,
}
"""Each imports its own: not every machine has the packages of all."""


LATENT = "mla"
"""Of a pool of latents: the Triton backend where it can run, else the one of torch. Both take pools of either kind."""

_OVER_LATENTS = ("auto", "flashinfer", LATENT)


def choose(
    name: str, device: torch.device, dtype: torch.dtype, *, latent: bool = False
) -> tuple[type[AttentionBackend], str]:
    """The backend that `name` stands for here, and why. name: `auto`, `mla` or a key of BACKENDS; latent: whether the
    pool will hold latents, which is what `mla` is for.

    `auto` takes Triton's on every GPU that can run it: it alone has plans that a CUDA graph can read. Raises
    InvalidValue for one that is configured and cannot run here, or not over such a pool.
    """
    if name not in _OVER_LATENTS if latent else name == LATENT:
        keeps, need = ("latents", _OVER_LATENTS) if latent else ("keys and values, not latents", ("auto", *BACKENDS))
        raise InvalidValue("engine.attention_backend", name, f"{' or '.join(need)}: the model keeps {keeps}")
    if name in ("auto", LATENT):
        lacks, kind = missing_for_triton(device), f"{LATENT}, " if latent else ""
        if lacks:
            return _sdpa(), f"{kind}sdpa: {lacks}"
        return _triton(), f"{kind}triton: trees, chains and splits in one call"
    if lacks := _missing(name, device, dtype):
        raise InvalidValue("engine.attention_backend", name, f"{LATENT if latent else 'sdpa'}: {lacks}")
    return BACKENDS[name](), f"{name}: configured"


def _missing(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    match name:
        case "flash":
            return missing_for_flash(device, dtype)
        case "flashinfer":
            return missing_for_flashinfer(device, dtype)
        case "triton":
            return missing_for_triton(device)
    return None
