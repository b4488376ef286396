"""Latent attention (MLA): DeepSeek-V2, arXiv 2405.04434, section 2.1, in absorbed form.

Knows the arithmetic from what attention reads to what it adds to the stream, and its parameters. Does not know pages,
sequences, files or the rest of a layer.

A position keeps a latent, normed, and a rotary key, rotated: one KV head for all query heads. A head's key is its
matrix times the latent, so its query times that matrix meets the latent itself, and the mean of its values is its other
matrix times the mean of latents. Keys and values of heads are never made, not in prefill either: a token then is the
same however it was computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from distspec.models.base import Attend, Paged
from distspec.models.config import Latent, ModelConfig
from distspec.models.parts import Parts
from distspec.models.product import Matrix
from distspec.models.rope import halved, rotate, score_growth

_EPS = 1e-6
"""Of the norms of latents, whatever the configuration says of others, in DeepSeek's code and in transformers."""


def latent_parts(config: ModelConfig, shape: Latent, at: str, inputs: int) -> dict[str, Parts]:
    """As llama.layer_parts, for the attention of the layer that a checkpoint names `at`. inputs: what it reads."""
    at, heads, query_dim = f"{at}.self_attn", config.num_heads, shape.plain_dim + shape.rope_dim
    latent: Parts = {f"{at}.kv_a_proj_with_mqa.weight": (shape.rank + shape.rope_dim, inputs)}
    table: dict[str, Parts] = {
        "latent_norm": {f"{at}.kv_a_layernorm.weight": (shape.rank,)},
        "expand": {f"{at}.kv_b_proj.weight": (heads * (shape.plain_dim + shape.value_dim), shape.rank)},
        "output": {f"{at}.o_proj.weight": (config.hidden_size, heads * shape.value_dim)},
    }
    if shape.query_rank is None:
        table["compress"] = {f"{at}.q_proj.weight": (heads * query_dim, inputs), **latent}
        return table
    table["compress"] = {f"{at}.q_a_proj.weight": (shape.query_rank, inputs), **latent}
    table["query_latent_norm"] = {f"{at}.q_a_layernorm.weight": (shape.query_rank,)}
    table["queries"] = {f"{at}.q_b_proj.weight": (heads * query_dim, shape.query_rank)}
    return table


class LatentAttention:
    """own: the parameters of `latent_parts`, by name. fused: what lies between the products is one kernel, where pages
    can be seen."""

    def __init__(self, config: ModelConfig, shape: Latent, own: Mapping[str, Tensor], *, fused: bool) -> None:
        self._shape = shape
        self._fused = fused
        self._heads = config.num_heads
        self._query_dim = shape.plain_dim + shape.rope_dim
        self._compress = Matrix(own["compress"])
        self._queries = Matrix(own["queries"]) if "queries" in own else None
        self._query_norm = own.get("query_latent_norm")
        self._latent_norm = own["latent_norm"]
        expand = own["expand"].view(self._heads, shape.plain_dim + shape.value_dim, shape.rank)
        self._keys = expand[:, : shape.plain_dim]
        self._values = expand[:, shape.plain_dim :].transpose(1, 2)
        self._output = Matrix(own["output"])
        # Whoever attends scales by the dimensions of a latent; meant are those of a head.
        meant = self._query_dim**-0.5 * score_growth(config.rope_scaling)
        self._scale = meant * config.head_dim**0.5

    def __call__(self, index: int, read: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """See llama.Attention."""
        shape = self._shape
        inner = self._heads * self._query_dim if self._query_norm is None else len(self._query_norm)
        queries, latents = self._compress(read).split_with_sizes((inner, shape.rank + shape.rope_dim), dim=-1)
        if self._queries is not None and self._query_norm is not None:
            queries = self._queries(F.rms_norm(queries, self._query_norm.shape, self._query_norm, _EPS))
        heads = queries.view(len(queries), self._heads, self._query_dim)
        plain, turned = heads.split_with_sizes((shape.plain_dim, shape.rope_dim), dim=-1)
        absorbed = torch.bmm(plain.transpose(0, 1), self._keys)
        mixed = self._attended(index, absorbed, turned, latents, rope, attend)
        mixed = mixed.view(-1, self._heads, shape.rank).transpose(0, 1)
        return self._output(torch.bmm(mixed, self._values).transpose(0, 1).flatten(1))

    def _attended(
        self, index: int, absorbed: Tensor, turned: Tensor, latents: Tensor, rope: Tensor, attend: Attend
    ) -> Tensor:
        """absorbed: [heads, rows, rank]; turned: [rows, heads, rope_dim], not rotated yet; latents: [rows, rank +
        rope_dim], neither normed nor rotated. Returns [rows, heads * rank]."""
        if self._fused and isinstance(attend, Paged):
            from distspec.kernels.latent import turn_and_write_latents  # imports Triton

            where, scale = (attend.write, attend.layers[index][0]), self._scale
            parts = (absorbed, turned, latents, self._latent_norm, rope)
            return attend.read(index, turn_and_write_latents(*parts, *where, scale=scale, eps=_EPS))
        rank = self._shape.rank
        q = torch.cat((absorbed.transpose(0, 1), rotate(halved(turned), rope)), dim=-1).mul_(self._scale)
        normed = F.rms_norm(latents[:, :rank], (rank,), self._latent_norm, _EPS)
        k = torch.cat((normed[:, None], rotate(halved(latents[:, None, rank:]), rope)), dim=-1)
        return attend(index, q, k, k[..., :rank])
