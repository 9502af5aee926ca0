"""The parts of a decoder layer in few launches, for a GPU. Each is built from a Transformers module of a known form;
`fuse` knows which, and keeps it only where it gives what that module gave.

Llama's layer comes down to nine launches: norm, merged q, k and v product, rotation with the KV write, attention,
output product, norm, merged gate and up product, gated activation, down product; the last product of each half adds to
the residual in place. The operations between the products are those of `ops`: `batchjob_kernels.ops.triton`, or
`reference_ops`, with which all of this runs on any device.

Inside, a step is two-dimensional, [num_tokens, hidden_size]; Transformers' own batch axis of 1 is put back at the edge.
A layer changes its input in place, as the models that it is built for read no earlier hidden state again.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from batchjob.engine.model.attention_hook import LayerCall, StepContext
from batchjob.engine.model.known_forwards import known_activation
from batchjob_kernels.ops.reference import ACTIVATIONS

Part = TypeVar("Part", bound=nn.Module)


class RMSNorm(nn.Module):
    """RMS norm over the last axis, by `ops.rms_norm`."""

    def __init__(self, norm: nn.Module, ops: ModuleType, *, offset: float = 0.0) -> None:
        """From a module with a weight and an epsilon. `offset` is 1 where the weight is stored less one (Gemma)."""
        super().__init__()
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        self.weight: nn.Parameter = norm.weight  # type: ignore[assignment]
        self.eps, self.offset = float(eps), offset  # type: ignore[arg-type]
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._ops.rms_norm(rows, self.weight, self.eps, offset=self.offset).view(x.shape)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)


class MergedLinear(nn.Module):
    """Linear layers of one input as one product, their outputs side by side. A single one keeps its weight as it is."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        if any(type(linear) is not nn.Linear for linear in linears):
            raise TypeError("not plain linear layers")
        weights: list[Tensor] = [linear.weight.detach() for linear in linears]  # type: ignore[union-attr, operator]
        biases = [linear.bias for linear in linears]
        self.weight = nn.Parameter(weights[0] if len(weights) == 1 else torch.cat(weights), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if any(bias is not None for bias in biases):
            pairs = zip(weights, biases, strict=True)
            filled = [weight.new_zeros(len(weight)) if bias is None else bias.detach() for weight, bias in pairs]  # type: ignore[operator]
            self.bias = nn.Parameter(torch.cat(filled), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + forward(x), in place; without a bias by the product itself."""
        if self.bias is None:
            return residual.addmm_(x, self.weight.t())
        return residual.add_(self(x))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up apart (Llama) or merged (Phi 3)."""

    def __init__(self, mlp: nn.Module, ops: ModuleType) -> None:
        super().__init__()
        merged = hasattr(mlp, "gate_up_proj")
        self.gate_up = _merged(mlp, "gate_up_proj") if merged else _merged(mlp, "gate_proj", "up_proj")
        self.down = _merged(mlp, "down_proj")
        activation = known_activation(mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn)
        if activation not in ACTIVATIONS:
            raise TypeError("its activation has no fused form")
        self._activation = activation
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.down(self._inner(rows)).view(x.shape)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.down.added(self._inner(x), residual)

    def _inner(self, x: Tensor) -> Tensor:
        return self._ops.act_and_mul(self.gate_up(x), self._activation)


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
        self._norms = _head_norms(attention, call.head_dim)
        merged = hasattr(attention, "qkv_proj")
        self.qkv = _merged(attention, "qkv_proj") if merged else _merged(attention, "q_proj", "k_proj", "v_proj")
        if len(self.qkv.weight) != (call.num_heads + 2 * call.num_kv_heads) * call.head_dim:
            raise TypeError("the projections give other heads than attention was called with")
        self.out = _merged(attention, "o_proj")
        self._half_angles = half_angles
        self._ops = ops

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, step: StepContext | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        return self.out(self.attend(hidden_states[0], position_embeddings, step))[None], None

    def attend(self, x: Tensor, position_embeddings: Any, step: StepContext | None) -> Tensor:
        """Everything before the output product: [num_tokens, num_heads * head_dim]."""
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
        return step.attend_written(self._layer_index, q, window=self.window, **self._settings).flatten(1)


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
        out, attended = self.self_attn.out, self.self_attn.attend(self.input_layernorm(x), position_embeddings, step)
        if out.bias is None:
            normed = self.post_attention_layernorm(out.added(attended, x))
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


def _merged(parent: nn.Module, *names: str) -> MergedLinear:
    return MergedLinear([getattr(parent, name) for name in names])


def _part(parent: nn.Module, name: str, kind: type[Part]) -> Part:
    part = getattr(parent, name)
    if not isinstance(part, kind):
        raise TypeError(f"{name} is not fused")
    return part


def _head_norms(attention: nn.Module, head_dim: int) -> dict[str, Any]:
    """What `rotary_write` is told of the norms of queries and keys, if there are any."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if norms == [None, None]:
        return {}
    q_norm, k_norm = norms
    if not isinstance(q_norm, RMSNorm) or not isinstance(k_norm, RMSNorm) or len(q_norm.weight) != head_dim:
        raise TypeError("the norms of queries and keys are not fused, or not per head")
    if (q_norm.eps, q_norm.offset) != (k_norm.eps, k_norm.offset):
        raise TypeError("queries and keys are normalised in two ways")
    return {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": q_norm.eps, "offset": q_norm.offset}
