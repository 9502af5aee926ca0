"""Attention over dense keys and values that also returns the log-sum-exp of the scores, so that parts can be merged."""

from __future__ import annotations

import torch
from torch import Tensor

# From this many query rows per KV head and keys on, products by oneDNN beat the attention kernel of PyTorch, whose own
# products go through MKL.
_PRODUCT_ROWS, _PRODUCT_KEYS = 128, 256
_SCORES_BYTES = 1 << 21  # of the scores that are worked on at once: what stays in a CPU's cache


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
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
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


def attend_decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, softcap: float | None = None, needs_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """One query per sequence: `q` [batch, kv_heads, group, head_dim], `k` and `v` [batch * kv_heads, keys, head_dim],
    `mask` [batch * kv_heads, 1, keys] -> output like `q` and log-sum-exp float32 [batch, kv_heads, group]."""
    rows = q.flatten(0, 1)  # [batch * kv_heads, group, head_dim]
    if softcap is not None or q.dtype != torch.float32:
        out, lse = attend(rows[:, None], k[:, None], v[:, None], scale=scale, softcap=softcap, mask=mask[:, None])
        return out.view(q.shape), lse.view(q.shape[:3])
    scores = torch.baddbmm(mask, rows, k.transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, 2)
    out = torch.bmm(weights, v).view(q.shape)
    return out, _log_sum_exp(scores, weights).view(q.shape[:3]) if needs_lse else None


def _log_sum_exp(scores: Tensor, weights: Tensor) -> Tensor:
    """The log-sum-exp over the last axis, given its softmax: the largest weight is exp(largest score - log-sum-exp)."""
    return scores.amax(-1) - weights.amax(-1).log_()


def attend_all(q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Every query to every key: `q` [heads, group, queries, head_dim], `k` and `v` [heads, keys, head_dim] -> output
    like `q` and log-sum-exp float32 [heads, group, queries]. The heads of a group become one, with more queries."""
    rows = q.flatten(1, 2)
    if softcap is None and rows.shape[1] >= _PRODUCT_ROWS and k.shape[1] >= _PRODUCT_KEYS and _has_onednn(q):
        out, lse = _by_products(rows, k, v, scale)
    else:
        out, lse = attend(rows[:, None], k[:, None], v[:, None], scale=scale, softcap=softcap)
    return out.view(q.shape), lse.view(q.shape[:3])


def _by_products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`q` [heads, rows, head_dim]; keys and values are the weights of two linear layers."""
    linear = torch.ops.mkldnn._linear_pointwise
    q, k, v = q * scale, k.contiguous(), v.transpose(1, 2).contiguous()
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2])
    step = max(32, _SCORES_BYTES // (4 * k.shape[1]))
    for head in range(len(q)):
        for start in range(0, q.shape[1], step):
            part = slice(start, start + step)
            scores = linear(q[head, part], k[head], None, "none", [], "")
            weights = torch.softmax(scores, 1)
            out[head, part] = linear(weights, v[head], None, "none", [], "")
            lse[head, part] = _log_sum_exp(scores, weights)
    return out, lse


def _has_onednn(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
