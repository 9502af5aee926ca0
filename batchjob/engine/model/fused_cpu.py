"""The parts of a decoder layer in fewer and larger operations. Each is built from a Transformers module of a known
form; `fuse` knows which, and keeps it only where it gives what that module gave.

Inside, a step is two-dimensional, [num_tokens, hidden_size]; Transformers' own batch axis of 1 is put back at the edge.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from batchjob.engine.model.attention_hook import LayerCall, StepContext
from batchjob.engine.model.known_forwards import known_activation
from batchjob.engine.model.packed_linear import POST_OPS, PackedLinear, can_pack


class FusedNorm(nn.Module):
    """RMS norm over the last axis as one operation."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self._weight = weight.detach().clone()
        self._eps = eps

    @classmethod
    def of(cls, norm: nn.Module, *, offset: float = 0.0) -> FusedNorm:
        """From a module with a weight and an epsilon. `offset` is 1 where the weight is stored less one (Gemma)."""
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        return cls(norm.weight + offset, float(eps))  # type: ignore[arg-type, operator]

    def reordered(self, order: Tensor) -> FusedNorm:
        return FusedNorm(self._weight[order], self._eps)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self._weight.shape, self._weight, self._eps)


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with the activation and both elementwise operations inside the products."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self._gate, self._up, self._down = (_packed(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        self._post_op = POST_OPS[known_activation(mlp.act_fn) or ""]

    def forward(self, x: Tensor) -> Tensor:
        return self._down(self._inner(x))

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._down.combined(self._inner(x), residual, "add")

    def _inner(self, x: Tensor) -> Tensor:
        return self._up.combined(x, self._gate.activated(x, self._post_op), "mul")


class FusedAttention(nn.Module):
    """Attention with separate q, k and v projections and rotary embedding of whole heads (Llama's form).

    One product gives q, k and v of a token side by side; the rotation is one complex product in place, for which the
    two halves of each head are interleaved in the weights. Scores do not depend on the order of a head's dimensions as
    long as q and k have the same, so the cache simply holds keys in that order.

    `query_scale`: beta and length of a scale by position (Ministral 3), see `StepContext.query_scale`.
    """

    def __init__(self, attention: nn.Module, call: LayerCall, *, query_scale: tuple[float, int] | None = None) -> None:
        super().__init__()
        self._query_scale = query_scale
        # Not the call itself, which holds the module that this one replaces, and its weights.
        self._settings: dict[str, Any] = {
            "scale": call.scale,
            "softcap": call.softcap,
            "sinks": call.sinks,
        }
        self.window = call.window  # of this name, so that the load check can shorten it
        self._layer_index = int(attention.layer_idx)  # type: ignore[arg-type]
        num_heads, num_kv_heads, dim = call.num_heads, call.num_kv_heads, call.head_dim
        self._num_heads, self._num_rotated, self._dim = num_heads, num_heads + num_kv_heads, dim
        order = torch.arange(dim).view(2, dim // 2).T.flatten()  # 0, dim/2, 1, dim/2 + 1, ...

        def rows(name: str, reorder: bool) -> tuple[Tensor, Tensor]:
            linear = getattr(attention, name)
            weight, bias = linear.weight, linear.bias
            bias = weight.new_zeros(len(weight)) if bias is None else bias
            if reorder:
                weight = weight.unflatten(0, (-1, dim))[:, order].flatten(0, 1)
                bias = bias.unflatten(0, (-1, dim))[:, order].flatten()
            return weight, bias

        weights, biases = zip(rows("q_proj", True), rows("k_proj", True), rows("v_proj", False), strict=True)
        bias = torch.cat(biases)
        self._qkv = PackedLinear(torch.cat(weights), bias if bool(bias.any()) else None)
        self._out = _packed(attention, "o_proj")
        self._norms = [_reordered_norm(getattr(attention, name, None), order) for name in ("q_norm", "k_norm")]

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, step: StepContext | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        return self._out(self._attend(hidden_states[0], position_embeddings, step))[None], None

    def added_to(self, residual: Tensor, x: Tensor, position_embeddings: Any, step: StepContext) -> Tensor:
        return self._out.combined(self._attend(x, position_embeddings, step), residual, "add")

    def _attend(self, x: Tensor, position_embeddings: Any, step: StepContext | None) -> Tensor:
        assert step is not None
        heads = self._qkv(x).view(len(x), -1, self._dim)  # [num_tokens, heads + 2 * KV heads, head_dim]
        q, k = heads[:, : self._num_heads], heads[:, self._num_heads : self._num_rotated]
        for part, norm in zip((q, k), self._norms, strict=True):
            if norm is not None:
                part.copy_(norm(part))
        pairs = torch.view_as_complex(heads[:, : self._num_rotated].unflatten(2, (-1, 2)))
        pairs.mul_(step.rotation(*position_embeddings))
        if self._query_scale is not None:
            q.mul_(step.query_scale(position_embeddings[0], *self._query_scale))
        kv = heads[:, self._num_heads :].unflatten(1, (2, -1))
        return step.attend(self._layer_index, q, kv, window=self.window, **self._settings).flatten(1)


class FusedLayer(nn.Module):
    """A decoder layer that normalises before attention and MLP (Llama's form): residuals are added in the products."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        if not isinstance(attention, FusedAttention) or not isinstance(mlp, FusedMLP):
            raise TypeError("attention and MLP are not fused")
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.self_attn, self.mlp = attention, mlp

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, step: StepContext | None = None, **_: Any
    ) -> Tensor:
        assert step is not None
        x = hidden_states[0]
        x = self.self_attn.added_to(x, self.input_layernorm(x), position_embeddings, step)  # type: ignore[operator]
        x = self.mlp.added_to(x, self.post_attention_layernorm(x))  # type: ignore[operator]
        return x[None]


def _packed(parent: nn.Module, name: str) -> PackedLinear:
    linear = getattr(parent, name)
    if type(linear) is not nn.Linear or not can_pack(linear.weight):
        raise TypeError(f"{name} is not a linear layer that can be packed")
    return PackedLinear(linear.weight, linear.bias)


def _reordered_norm(norm: nn.Module | None, order: Tensor) -> nn.Module | None:
    if norm is None:
        return None
    if not isinstance(norm, FusedNorm):
        raise TypeError("the norm of queries or keys is not fused")
    return norm.reordered(order)
