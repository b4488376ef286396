"""Attention over paged KV: one interface, siblings that implement it, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distspec.attention.available import missing_for_flash, missing_for_triton
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


BACKENDS: dict[str, Callable[[], type[AttentionBackend]]] = {
    "flash": _flash,
    "sdpa": _sdpa,
    "triton": _triton,
}
"""Each imports its own: not every machine has the packages of all."""


LATENT = "mla"
"""Of a pool of latents: the Triton backend where it can run, else the one of torch. Both take pools of either kind."""


def choose(
    name: str, device: torch.device, dtype: torch.dtype, *, latent: bool = False
) -> tuple[type[AttentionBackend], str]:
    """The backend that `name` stands for here, and why. name: `auto`, `mla` or a key of BACKENDS; latent: whether the
    pool will hold latents, which is what `mla` is for.

    `auto` takes Triton's on every GPU that can run it: it alone has plans that a CUDA graph can read. Raises
    InvalidValue for one that is configured and cannot run here, or not over such a pool.
    """
    if name != "auto" and latent != (name == LATENT):
        keeps, need = ("latents", [LATENT]) if latent else ("keys and values, not latents", sorted(BACKENDS))
        raise InvalidValue("engine.attention_backend", name, f"{' or '.join(['auto', *need])}: the model keeps {keeps}")
    missing = {"flash": missing_for_flash(device, dtype), "triton": missing_for_triton(device)}
    if name in ("auto", LATENT):
        lacks, kind = missing["triton"], f"{LATENT}, " if latent else ""
        if lacks:
            return _sdpa(), f"{kind}sdpa: {lacks}"
        return _triton(), f"{kind}triton: trees, chains and splits in one call"
    if lacks := missing.get(name):
        raise InvalidValue("engine.attention_backend", name, f"sdpa: {lacks}")
    return BACKENDS[name](), f"{name}: configured"
