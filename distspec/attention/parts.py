"""Attention in two parts: over keys that every row sees, without a mask, and over the rest, with one.

Knows softmax and which of torch's kernels tell their log-sum-exp. Does not know pages, spans or why a row sees what
it sees.
"""

from __future__ import annotations

import torch
from torch import Tensor


def two_parts(q: Tensor, keys: Tensor, values: Tensor, shared: int, mask: Tensor) -> Tensor:
    """softmax(q keys^T * dim ** -0.5 + mask) values, where the mask of the first `shared` keys is 0.

    q: [batch, heads, rows, dim]; keys, values: [batch, heads, n, dim]; mask: 0 or -inf, [batch, 1, rows, n - shared],
    of q's dtype, on CUDA with strides of whole 16 bytes; each row must see a key of either part. Returns [batch, heads,
    rows, dim]. The parts are merged by their log-sum-exp, as in FlashAttention (arXiv 2205.14135) and Hydragen
    (arXiv 2402.05099).
    """
    (first_keys, rest_keys), (first_values, rest_values) = (
        x.split_with_sizes((shared, x.shape[2] - shared), dim=2) for x in (keys, values)
    )
    first, first_sum = _part(q, first_keys, first_values, None)
    rest, rest_sum = _part(q, rest_keys, rest_values, mask.expand(-1, q.shape[1], -1, -1))
    share = torch.sigmoid(first_sum - rest_sum)
    return torch.lerp(rest, first, share.to(q.dtype).unsqueeze(-1))


def _part(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and the log of the sum of exp(scores): float32 [batch, heads, rows]."""
    if not q.is_cuda:
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, attn_mask=mask)
    elif mask is None and q.dtype != torch.float32:
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values)[:2]
    else:
        output, log_sum = torch.ops.aten._scaled_dot_product_efficient_attention(q, keys, values, mask, True)[:2]
    return output, log_sum[:, :, : q.shape[2]]
