"""Chooses the attention backend and the fused operations that serve a model on a device."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from batchjob.engine.config import EngineConfig
from batchjob.engine.model.attention_hook import LayerCall
from batchjob.errors import EngineError
from batchjob_kernels import Requirements
from batchjob_kernels.attention.select import Selection, select
from batchjob_kernels.triton_kernels import available


def choose_backend(
    config: EngineConfig, calls: Sequence[LayerCall], *, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Selection:
    """Raises EngineError, which says why the one that was asked for cannot be used."""
    need = Requirements(
        device=device,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dims=frozenset(call.head_dim for call in calls),
        group_sizes=frozenset(call.num_heads // call.num_kv_heads for call in calls),
        block_size=config.block_size,
        windows=any(call.window is not None for call in calls),
        softcap=any(call.softcap is not None for call in calls),
        sinks=any(call.sinks is not None for call in calls),
        deterministic=config.deterministic,
    )
    try:
        return select(config.attention_backend, need)
    except ValueError as error:
        raise EngineError(f"{error}; see --attention-backend, --kv-cache-dtype and --block-size") from None


def fused_ops(device: torch.device, *, deterministic: bool) -> ModuleType | None:
    """The elementwise operations of fused parts on a GPU; None where the CPU's serve, or none."""
    if device.type != "cuda" or deterministic or available.problem(device) is not None:
        return None
    from batchjob_kernels.ops import triton as triton_ops

    return triton_ops
