"""Attention over dense keys and values that also returns the log-sum-exp of the scores, so that parts can be merged."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """`q` [batch, heads, queries, head_dim], `k` and `v` [batch, heads or 1, keys, head_dim] -> output like `q` and
    log-sum-exp float32 [batch, heads, queries]. `mask` is added to the scores; `causal` needs as many keys as queries.
    """
    if q.device.type == "cpu" and softcap is None:
        k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores += mask
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=3)
    weights = torch.exp(scores - lse[..., None]).to(q.dtype)
    return torch.matmul(weights, v), lse
