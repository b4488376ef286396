"""Attention over one sequence by the book: the reference that models are tested with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from distspec.models.llama import Llama


class Causal:
    """An `Attend` that remembers one sequence; each call adds its rows at the end and masks later ones."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kv:
            k, v = (torch.cat(pair) for pair in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = (k, v)
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1).flatten(1)


@torch.inference_mode()
def logits(model: Llama, tokens: list[int], chunks: list[int] | None = None) -> Tensor:
    """float32 [len(tokens), vocab]: the model over one sequence, in one go or in chunks of these sizes."""
    attend = Causal()
    sizes = chunks or [len(tokens)]
    ids = torch.tensor(tokens, device=model.embedding.device)
    positions = torch.arange(len(tokens), device=ids.device)
    parts = zip(torch.split(ids, sizes), torch.split(positions, sizes), strict=True)
    return torch.cat([model.logits(model.forward(chunk, at, attend)) for chunk, at in parts])
