"""The attention function that is put into Transformers models, and what it is given through the model's `forward`.

Transformers calls it from every attention module with queries and keys already rotated; one `StepContext` per step
travels beside them as the keyword argument `step`, or as the step that is being computed where a model drops keyword
arguments on the way. Anything else it is told that would change the result, and that it
does not know, is refused: an ignored window or bias would make every output silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from batchjob.engine.kv_cache import KVCache
from batchjob.errors import UnsupportedModelError
from batchjob_kernels import AttnMeta

ATTENTION_NAME = "batchjob_paged"

# Attention modules whose window is in the mask that their model builds, and not among the arguments of the function.
# Each is what the model's own code says when it chooses the mask.
_WINDOWS_IN_MASKS: dict[str, Callable[[Any], int | None]] = {
    "PhimoeAttention": lambda module: module.config.sliding_window,
    "Qwen2MoeAttention": lambda module: getattr(module, "sliding_window", None),
}

# Keyword arguments that reach the function and do not change what it computes.
_NEUTRAL = frozenset({"position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"})


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments with which one attention module called the function, for the load check."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of what is cached: the larger of the sizes of keys and values
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


@dataclass(slots=True, eq=False)
class StepContext:
    """One step: its layout, the cache it writes to, the backend that computes. Without a cache it only records."""

    meta: AttnMeta | None = None
    cache: KVCache | None = None
    backend: ModuleType | None = None
    calls: list[LayerCall] = field(default_factory=list)
    check_finite: bool = False  # whether `nonfinite` is wanted
    positions: Tensor | None = None  # int64 [num_tokens]: of the tokens, while the step is computed
    nonfinite: Tensor | None = None  # bool [num_tokens]: the model's last hidden state is not finite there
    _query_scales: dict[tuple[float, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def query_scale(self, cos: Tensor, beta: float, length: int) -> Tensor:
        """The factor of Ministral 3's queries, [num_tokens, 1, 1]: 1 before position `length`, then more with each
        multiple of it. Computed once per forward for all layers that are given the same `cos`."""
        known = self._query_scales.get((beta, length))
        if known is None or known[0] is not cos:
            assert self.positions is not None
            scale = 1 + beta * torch.log(1 + torch.floor(self.positions / length))
            known = self._query_scales[beta, length] = cos, scale[:, None, None]
        return known[1]

    def attend(
        self,
        layer_index: int,
        q: Tensor,
        kv: Tensor | None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Stores `kv` [num_tokens, 2, kv_heads, head_dim] and attends; without it the step's keys and values are in the
        cache already. `q` and the result are [num_tokens, heads, head_dim]."""
        assert self.meta is not None
        assert self.backend is not None
        layer = self.layer(layer_index)
        if kv is not None:
            self.backend.write_kv(kv, layer, self.meta)
        return self.backend.paged_attention(
            q, kv, layer, self.meta, scale=scale, window=window, softcap=softcap, sinks=sinks
        )

    def layer(self, layer_index: int) -> Tensor:
        """The cache of one layer."""
        assert self.cache is not None
        return self.cache.layers[layer_index]


# By thread: each step is computed whole by one thread, and a CUDA graph is captured by one.
_current: ContextVar[StepContext | None] = ContextVar("current step", default=None)


def current_step() -> StepContext | None:
    """The step that this thread is computing."""
    return _current.get()


@contextmanager
def computing(step: StepContext) -> Iterator[None]:
    """Makes `step` the current step."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def injected_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    step: StepContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called as Transformers calls an attention function: `query` [1, heads, num_tokens, head_dim], `key` and `value`
    with their own number of heads. Returns [1, num_tokens, heads, head_dim]. Raises UnsupportedModelError."""
    name = type(module).__name__
    step = current_step() if step is None else step
    if step is None:
        raise UnsupportedModelError(f"{name} is computed outside of a step")
    if sliding_window is None and name in _WINDOWS_IN_MASKS:
        sliding_window = _WINDOWS_IN_MASKS[name](module)
    unknown = sorted(key for key, value in others.items() if key not in _NEUTRAL and not _is_default(value))
    if attention_mask is not None:
        unknown.insert(0, "attention_mask")
    if dropout:
        unknown.append("dropout")
    if unknown:
        raise UnsupportedModelError(f"{name} wants attention with {', '.join(unknown)}, which is not supported")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if step.cache is None:
        shape = query.shape[1], key.shape[1], max(key.shape[3], value.shape[3])
        step.calls.append(LayerCall(module, *shape, scale, sliding_window, softcap, s_aux))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    value_dim = value.shape[3]
    if key.shape[3] != value_dim:  # zeros add nothing to a product, and the result's are cut off
        size = max(key.shape[3], value_dim)
        query, key, value = (functional.pad(x, (0, size - x.shape[3])) for x in (query, key, value))
    kv = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)  # [num_tokens, 2, kv_heads, head_dim]
    out = step.attend(
        layer_index_of(module),
        query[0].transpose(0, 1),
        kv,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None, :, :, :value_dim], None


def layer_index_of(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UnsupportedModelError(f"{type(module).__name__} does not say which layer it belongs to")
    return index


def _is_default(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float) and not value)


def register() -> None:
    """Makes the function known to Transformers. With no mask function of that name, none is built and none passed."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, injected_attention)
