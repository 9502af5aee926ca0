"""The parts of a decoder layer in few and large operations. Each is built from a Transformers module of a known form;
`fuse` knows which, and keeps it only where it gives what that module gave.

The elementwise operations are those of `ops` (batchjob_kernels.ops: `triton` on a GPU, `cpu`, and the plain
`reference`), the products those of `linears` (plain, or packed for a CPU). With Triton, Llama's layer comes down to
nine launches: norm, merged q, k and v product, rotation with the KV write, attention, output product, norm, merged
gate and up product, gated activation, down product; the last product of each half adds to the residual.

Inside, a step is two-dimensional, [num_tokens, hidden_size]; Transformers' own batch axis of 1 is put back at the edge.
A layer may change its input in place, as the models that it is built for read no earlier hidden state again.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from batchjob.engine.model.attention_hook import LayerCall, StepContext
from batchjob.engine.model.known_forwards import known_activation
from batchjob.engine.model.linear import Linears, merged
from batchjob_kernels.ops.reference import ACTIVATIONS

Part = TypeVar("Part", bound=nn.Module)


class RMSNorm(nn.Module):
    """RMS norm over the last axis, by `ops.rms_norm`."""

    def __init__(self, norm: nn.Module, ops: ModuleType, *, offset: float = 0.0) -> None:
        """`norm` has a weight and an epsilon. `offset` is 1 where the weight is stored less one (Gemma)."""
        super().__init__()
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        weight: nn.Parameter = norm.weight  # type: ignore[assignment]
        if offset and weight.dtype == torch.float32:  # else the sum would be rounded
            weight, offset = nn.Parameter(weight.detach() + offset, requires_grad=False), 0.0
        self.weight = weight
        self.eps, self.offset = float(eps), offset  # type: ignore[arg-type]
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._ops.rms_norm(rows, self.weight, self.eps, offset=self.offset).view(x.shape)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up apart (Llama) or merged (Phi 3)."""

    def __init__(self, mlp: nn.Module, ops: ModuleType, linears: Linears) -> None:
        super().__init__()
        names = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
        activation = known_activation(mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn)
        if activation not in ACTIVATIONS:
            raise TypeError("its activation has no fused form")
        self.gated = linears.gated(*merged(mlp, *names), activation, ops)
        self.down = linears.linear(*merged(mlp, "down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.down(self.gated(rows)).view(x.shape)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x)."""
        return self.down.added(self.gated(x), residual)  # type: ignore[operator]


class PagedAttention(nn.Module):
    """Attention with rotary embedding of whole heads or of their first dimensions; q, k and v projections apart
    (Llama) or merged (Phi 3); with norms per head of queries and keys (Qwen 3) or without.

    `half_angles`: the model gives each cosine and sine once, not once for each half of a head (gpt-oss).
    `query_scale`: beta and length of a scale by position (Ministral 3), see `StepContext.query_scale`.
    """

    def __init__(
        self,
        attention: nn.Module,
        call: LayerCall,
        ops: ModuleType,
        linears: Linears,
        *,
        half_angles: bool = False,
        query_scale: tuple[float, int] | None = None,
    ) -> None:
        super().__init__()
        self._query_scale = query_scale
        self._layer_index = int(attention.layer_idx)  # type: ignore[arg-type]
        self.window = call.window  # of this name, so that the load check can shorten it
        self._num_heads, self._head_dim = call.num_heads, call.head_dim
        self._settings: dict[str, Any] = {
            "scale": call.scale,
            "softcap": call.softcap,
            "sinks": call.sinks,
        }  # not the call itself, which holds the module that this one replaces
        order: Tensor | None = ops.head_order(call.head_dim)
        self._norms = _head_norms(attention, call.head_dim, order)
        names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        weight, bias = merged(attention, *names)
        if len(weight) != (call.num_heads + 2 * call.num_kv_heads) * call.head_dim:
            raise TypeError("the projections give other heads than attention was called with")
        if order is not None:
            num_rotated = (call.num_heads + call.num_kv_heads) * call.head_dim
            weight = _reordered(weight, num_rotated, order)
            bias = None if bias is None else _reordered(bias, num_rotated, order)
        self.qkv = linears.linear(weight, bias)
        self.out = linears.linear(*merged(attention, "o_proj"))
        self._half_angles = half_angles
        self._ops = ops

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, step: StepContext | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        return self.out(self.attend(hidden_states[0], position_embeddings, step))[None], None

    def attend(self, x: Tensor, position_embeddings: Any, step: StepContext | None) -> Tensor:
        """Attention without the output product: [num_tokens, num_heads * head_dim]."""
        assert step is not None
        cos, sin = position_embeddings
        q = self._ops.rotary_write(
            self.qkv(x).view(len(x), -1, self._head_dim),
            cos[0],
            sin[0],
            step.layer(self._layer_index),
            step.meta,
            num_heads=self._num_heads,
            rotary_dim=2 * cos.shape[2] if self._half_angles else None,
            **self._norms,
        )
        if self._query_scale is not None:
            q = q * step.query_scale(cos, *self._query_scale).to(q.dtype)
        return step.attend(self._layer_index, q, None, window=self.window, **self._settings).flatten(1)


class PreNormLayer(nn.Module):
    """A decoder layer that normalises before attention and MLP (Llama). The MLP may be of any kind (experts)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if hasattr(layer, "pre_feedforward_layernorm"):
            raise TypeError("it normalises after attention as well")
        self.self_attn = _part(layer, "self_attn", PagedAttention)
        self.input_layernorm = _part(layer, "input_layernorm", RMSNorm)
        self.post_attention_layernorm = _part(layer, "post_attention_layernorm", RMSNorm)
        self.mlp = layer.mlp

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, step: StepContext | None = None, **_: Any
    ) -> Tensor:
        x = hidden_states[0]
        out: Any = self.self_attn.out
        attended = self.self_attn.attend(self.input_layernorm(x), position_embeddings, step)
        if out.adds_in_product:
            x = out.added(attended, x)
            normed = self.post_attention_layernorm(x)
        else:
            normed, x = self.post_attention_layernorm.after_adding(out(attended), x)
        if isinstance(self.mlp, GatedMLP):
            return self.mlp.added_to(x, normed)[None]
        added = self.mlp(normed[None])  # type: ignore[operator]
        return x.add_((added[0] if isinstance(added, tuple) else added)[0])[None]


class SandwichLayer(nn.Module):
    """A decoder layer that normalises before and after attention and MLP (Gemma 2 and 3)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.self_attn = _part(layer, "self_attn", PagedAttention)
        self.mlp = _part(layer, "mlp", GatedMLP)
        self.input_layernorm = _part(layer, "input_layernorm", RMSNorm)
        self.post_attention_layernorm = _part(layer, "post_attention_layernorm", RMSNorm)
        self.pre_feedforward_layernorm = _part(layer, "pre_feedforward_layernorm", RMSNorm)
        self.post_feedforward_layernorm = _part(layer, "post_feedforward_layernorm", RMSNorm)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, step: StepContext | None = None, **_: Any
    ) -> Tensor:
        x = hidden_states[0]
        attended = self.self_attn.attend(self.input_layernorm(x), position_embeddings, step)
        added = self.post_attention_layernorm(self.self_attn.out(attended))
        normed, x = self.pre_feedforward_layernorm.after_adding(added, x)
        return x.add_(self.post_feedforward_layernorm(self.mlp(normed)))[None]


def _part(parent: nn.Module, name: str, kind: type[Part]) -> Part:
    part = getattr(parent, name)
    if not isinstance(part, kind):
        raise TypeError(f"{name} is not fused")
    return part


def _head_norms(attention: nn.Module, head_dim: int, order: Tensor | None) -> dict[str, Any]:
    """The arguments of `rotary_write` for norms of queries and keys, if there are any."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if norms == [None, None]:
        return {}
    q_norm, k_norm = norms
    if not isinstance(q_norm, RMSNorm) or not isinstance(k_norm, RMSNorm) or len(q_norm.weight) != head_dim:
        raise TypeError("the norms of queries and keys are not fused, or not per head")
    if (q_norm.eps, q_norm.offset) != (k_norm.eps, k_norm.offset):
        raise TypeError("queries and keys are normalised in two ways")
    q_weight, k_weight = (norm.weight if order is None else norm.weight[order] for norm in (q_norm, k_norm))
    return {"q_norm": q_weight, "k_norm": k_weight, "eps": q_norm.eps, "offset": q_norm.offset}


def _reordered(rows: Tensor, num_rotated: int, order: Tensor) -> Tensor:
    """A merged weight or bias with the dimensions of each query and key head in another order.

    Scores do not depend on the order of a head's dimensions as long as q and k have the same; the cache holds keys in
    that order.
    """
    heads = rows[:num_rotated].unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
    return torch.cat((heads, rows[num_rotated:]))
