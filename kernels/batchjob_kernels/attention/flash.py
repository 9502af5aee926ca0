"""PyTorch's own FlashAttention over a block table: `torch.nn.attention.varlen.varlen_attn`, where the installed PyTorch
and the GPU have it. Writing keys and values is `gather`'s.

Used with `num_splits=1`: rows left unwritten with a split KV range have been reported (PyTorch issue 194167). What it
gives is held against `reference` once per process and kind of layer, before it serves any.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from batchjob_kernels.attention import gather, reference
from batchjob_kernels.attention.meta import AttnMeta, Requirements

USES_DEVICE_LENS = True
COMPILED_FOR_BLOCK_SIZE = True  # serves multiples of a page only

PAGE_MULTIPLE = 256  # tokens; what FlashAttention 2 asks of a block
_PARAMETERS = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
_TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}  # greatest difference, for values of a normal distribution

write_kv = gather.write_kv


def paged_attention(
    q: Tensor,
    kv: Tensor | None,
    cache: Tensor,
    meta: AttnMeta,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.paged_attention`; without soft-cap and sinks."""
    if softcap is not None or sinks is not None:
        raise ValueError("varlen_attn has no soft-cap and no sinks")
    launch = _launch(meta, q.device)
    keys, values = cache.transpose(2, 3).unbind(1)  # [num_blocks, block_size, kv_heads, head_dim], a view
    out = _varlen()(
        q,
        keys,
        values,
        launch["query_starts"],
        None,
        max(meta.query_lens),
        launch["max_kv_len"],
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=launch["kv_lens"],
        block_table=launch["block_table"],
        num_splits=1,
    )
    assert isinstance(out, Tensor)
    return out


def refusal(need: Requirements) -> str | None:
    """The reason why it cannot serve this need, or None."""
    if need.device.type != "cuda":
        return "varlen_attn runs on CUDA devices only"
    problem = _missing()
    if problem is not None:
        return problem
    if need.capability is not None and need.capability < (8, 0):
        return f"varlen_attn needs compute capability 8.0; this device has {need.capability[0]}.{need.capability[1]}"
    if need.softcap or need.sinks:
        return "varlen_attn has no soft-cap and no sinks, which the model has"
    if need.dtype not in _TOLERANCE:
        return f"varlen_attn computes in float16 and bfloat16, not in {need.dtype}"
    if need.kv_dtype != need.dtype:
        return "varlen_attn reads keys and values of the queries' type only"
    if need.deterministic:
        return "it is not proven that a row's bits do not depend on the other rows"
    if need.block_size % PAGE_MULTIPLE:
        return f"varlen_attn needs --block-size of a multiple of {PAGE_MULTIPLE}, not {need.block_size}"
    for head_dim in sorted(need.head_dims):
        for group_size in sorted(need.group_sizes):
            problem = _self_test(need.device, need.dtype, head_dim, group_size, need.block_size, need.windows)
            if problem is not None:
                return problem
    return None


def _varlen() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _missing() -> str | None:
    try:
        parameters = inspect.signature(_varlen()).parameters
    except ImportError:
        return f"PyTorch {torch.__version__} has no varlen_attn"
    missing = sorted(_PARAMETERS - parameters.keys())
    return f"varlen_attn of PyTorch {torch.__version__} lacks {', '.join(missing)}" if missing else None


def _launch(meta: AttnMeta, device: torch.device) -> dict[str, Any]:
    """The step's lengths as it wants them; made once per step."""
    launch = meta.memo.get("flash")
    if launch is None:
        width = meta.block_table.shape[1] * meta.block_size
        if meta.device_lens is not None:
            lens = meta.device_lens
            table = meta.block_table.index_select(0, lens.table_rows)
            launch = {"query_starts": lens.query_starts, "kv_lens": lens.kv_lens, "max_kv_len": width}
        else:
            starts = torch.tensor([0, *meta.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            kv_lens = torch.tensor(meta.kv_lens, dtype=torch.int32)
            table = meta.block_table
            launch = {"query_starts": starts.to(device), "kv_lens": kv_lens.to(device), "max_kv_len": max(meta.kv_lens)}
        launch["block_table"] = table.to(torch.int32)
        meta.memo["flash"] = launch
    return launch


@lru_cache
def _self_test(
    device: torch.device, dtype: torch.dtype, head_dim: int, group_size: int, block_size: int, windows: bool
) -> str | None:
    """Three sequences, decode and prompt parts over long KV, against `reference`."""
    generator = torch.Generator().manual_seed(0)
    query_lens, kv_lens = [1, 37, 1], [5 * block_size + 3, 3 * block_size + 50, block_size - 1]
    width = max(-(-length // block_size) for length in kv_lens)
    num_kv_heads = 2
    table = torch.randperm(width * len(kv_lens), generator=generator).view(-1, width)
    shape = (table.numel() + 1, 2, num_kv_heads, block_size, head_dim)
    cache = torch.randn(shape, generator=generator).to(device, dtype)
    q = torch.randn(sum(query_lens), num_kv_heads * group_size, head_dim, generator=generator).to(device, dtype)
    meta = AttnMeta(query_lens, kv_lens, table.to(device), torch.zeros(len(q), dtype=torch.int64), block_size)
    for window in (None, block_size // 2) if windows else (None,):
        try:
            actual = paged_attention(q, None, cache, meta, scale=head_dim**-0.5, window=window)
        except (RuntimeError, ValueError, TypeError) as error:
            return f"varlen_attn failed its start-up test: {str(error).splitlines()[0]}"
        expected = reference.paged_attention(q, None, cache, meta, scale=head_dim**-0.5, window=window)
        difference = float((actual.float() - expected.float()).abs().max())
        if not difference <= _TOLERANCE[dtype]:
            return f"varlen_attn differs from the reference by {difference:.2g} in its start-up test"
    return None
