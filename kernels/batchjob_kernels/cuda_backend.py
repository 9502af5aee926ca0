"""Paged attention by the project's own CUDA kernels: the KV write, and steps that bring one token per sequence.

Every other step (prompts, parts of prompts) goes to the Triton backend, or to `gather` where Triton is not installed.
Opt-in: `--attention-backend cuda`.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from batchjob_kernels import cuda_driver as driver
from batchjob_kernels import gather, triton_here
from batchjob_kernels.cuda_build import DTYPES, HEAD_DIMS, decode_variant, write_variant
from batchjob_kernels.cuda_compilers import CompilerMissing, find_compiler
from batchjob_kernels.meta import AttnMeta, Requirements

MAX_GROUP = 16
_THREADS, _WRITE_THREADS, _SHARED_BYTES = 128, 256, 3 * 16384  # as in the sources
# Blocks of threads that a launch should have per multiprocessor, by splits if it must: four run at a time, and several
# rounds even out sequences of unequal lengths.
_BLOCKS_PER_MULTIPROCESSOR, _MAX_SPLITS = 16, 64


class WriteParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kv", "cache", "slots")),
        ("kv_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_kv_heads", "head_dim", "block_shift")),
    )


class DecodeParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "cache", "block_table", "table_rows", "kv_lens", "sinks")),
        *((name, ctypes.c_void_p) for name in ("out", "partial", "partial_stats")),
        *((name, ctypes.c_longlong) for name in ("q_stride", "table_stride")),
        *((name, ctypes.c_int) for name in ("num_kv_heads", "group", "block_shift", "num_splits", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class _Lookup(NamedTuple):
    """Where the kernel finds its lengths and blocks; int32 on the device."""

    block_table: Tensor
    table_rows: Tensor | None
    kv_lens: Tensor


def refusal(need: Requirements) -> str | None:
    """Why this backend cannot serve `need`, for a person; None: it can."""
    if need.device.type != "cuda":
        return f"its kernels need a CUDA device, not {need.device.type}"
    if need.capability is not None and need.capability < (8, 0):
        version = ".".join(map(str, need.capability))
        return f"its kernels need compute capability 8.0 (asynchronous copies), the device has {version}"
    if need.deterministic:
        return "it splits keys by the number of sequences in the step"
    if need.dtype not in DTYPES or need.kv_dtype not in (need.dtype, torch.float8_e4m3fn):
        return (
            "it works in float16, bfloat16 or float32, with a cache of the same type or of float8_e4m3fn, not in "
            f"{_short(need.dtype)} with a cache of {_short(need.kv_dtype)}"
        )
    if wrong := sorted(need.head_dims - set(HEAD_DIMS)):
        return f"it has head sizes {', '.join(map(str, HEAD_DIMS))}, not {', '.join(map(str, wrong))}"
    if wrong := sorted(size for size in need.group_sizes if not 1 <= size <= MAX_GROUP):
        return f"it takes up to {MAX_GROUP} query heads per KV head, not {wrong[-1]}"
    if need.block_size < 8 or need.block_size & (need.block_size - 1):
        return f"it needs a block size that is a power of two and at least 8, not {need.block_size}"
    try:
        find_compiler()
    except CompilerMissing as error:
        return f"its kernels are compiled on the machine where they run, and {error}"
    if problem := driver.missing():
        return problem
    reason: str | None = _other_backend().refusal(need)
    return f"prompts go to {_name(_other_backend())}, which refuses: {reason}" if reason else None


def write_kv(kv: Tensor, cache: Tensor, meta: AttnMeta) -> None:
    """As `reference.write_kv`; numbers past the range of an FP8 cache become its largest."""
    num_tokens, _, num_kv_heads, head_dim = kv.shape
    if num_tokens == 0:
        return
    _check(kv, cache, meta)
    kv = _rows(kv)
    slots = meta.slots
    if slots.dtype != torch.int64 or not slots.is_contiguous() or slots.numel() != num_tokens:
        raise ValueError(f"slots must be {num_tokens} contiguous int64, not {tuple(slots.shape)} {slots.dtype}")
    params = WriteParams(
        kv=kv.data_ptr(),
        cache=cache.data_ptr(),
        slots=slots.data_ptr(),
        kv_stride=kv.stride(0),
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_shift=meta.block_size.bit_length() - 1,
    )
    grid = (-(-kv.numel() // (8 * _WRITE_THREADS)), 1, 1)
    driver.launch(write_variant(kv.dtype, cache.dtype), "batchjob_write_kv", grid, _WRITE_THREADS, 0, params, kv.device)


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
    """As `reference.paged_attention`. A decode step with `meta.device_lens` may be captured in a CUDA graph once a step
    like it has run: what is launched depends on the number of sequences alone, and lengths are read on the device."""
    if "cuda" not in meta.plans:
        meta.plans["cuda"] = (
            _look_up(meta, q.device) if all(length == 1 for length in meta.query_lens) else _hand_over(meta)
        )
    plan = meta.plans["cuda"]
    if isinstance(plan, _Lookup):
        return _decode(q, cache, meta, plan, scale=scale, window=window, softcap=softcap, sinks=sinks)
    other: Tensor = _other_backend().paged_attention(
        q, kv, cache, plan or meta, scale=scale, window=window, softcap=softcap, sinks=sinks
    )
    return other


def _decode(
    q: Tensor,
    cache: Tensor,
    meta: AttnMeta,
    lookup: _Lookup,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = cache.shape[2]
    group = num_heads // num_kv_heads
    _check(q, cache, meta)
    if head_dim not in HEAD_DIMS or num_heads % num_kv_heads or not 1 <= group <= MAX_GROUP:
        raise ValueError(f"no kernel for {num_heads} heads of {head_dim} over {num_kv_heads} KV heads")
    q = _rows(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    wanted = _BLOCKS_PER_MULTIPROCESSOR * driver.num_multiprocessors(q.device)
    num_splits = min(-(-wanted // (num_seqs * num_kv_heads)), _MAX_SPLITS)
    partial = stats = None
    if num_splits > 1:
        partial = torch.empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((num_seqs, num_heads, num_splits, 2), dtype=torch.float32, device=q.device)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    params = DecodeParams(
        q=q.data_ptr(),
        cache=cache.data_ptr(),
        block_table=lookup.block_table.data_ptr(),
        table_rows=None if lookup.table_rows is None else lookup.table_rows.data_ptr(),
        kv_lens=lookup.kv_lens.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        partial=None if partial is None else partial.data_ptr(),
        partial_stats=None if stats is None else stats.data_ptr(),
        q_stride=q.stride(0),
        table_stride=lookup.block_table.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        block_shift=meta.block_size.bit_length() - 1,
        num_splits=num_splits,
        window=window or 0,
        scale=scale,
        softcap=softcap or 0.0,
    )
    variant = decode_variant(q.dtype, cache.dtype, head_dim, group)
    grid = (num_kv_heads, num_splits, num_seqs)
    driver.launch(variant, "batchjob_decode", grid, _THREADS, _SHARED_BYTES, params, q.device)
    if num_splits > 1:
        driver.launch(variant, "batchjob_merge", (num_heads, num_seqs, 1), head_dim, 0, params, q.device)
    return out


def _look_up(meta: AttnMeta, device: torch.device) -> _Lookup:
    lens = meta.device_lens
    if lens is None:
        kv_lens = torch.tensor(meta.kv_lens, dtype=torch.int32).to(device)
        return _Lookup(meta.block_table.to(device, torch.int32).contiguous(), None, kv_lens)
    for name, tensor in (("block_table", meta.block_table), ("table_rows", lens.table_rows), ("kv_lens", lens.kv_lens)):
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be int32 without gaps, not {tensor.dtype} with strides {tensor.stride()}")
    return _Lookup(meta.block_table, lens.table_rows, lens.kv_lens)


def _other_backend() -> ModuleType:
    """What serves the steps that are no decode steps."""
    if triton_here.problem(torch.device("cuda")) is not None:
        return gather
    return importlib.import_module("batchjob_kernels.triton_backend")


def _hand_over(meta: AttnMeta) -> AttnMeta | None:
    """The step as the other backend wants it, None: as it is. `gather` knows nothing of lengths on the device."""
    if _other_backend() is not gather or meta.device_lens is None:
        return None
    rows = meta.block_table[meta.device_lens.table_rows.long()]
    return replace(meta, block_table=rows, device_lens=None, plans={})


def _check(new: Tensor, cache: Tensor, meta: AttnMeta) -> None:
    """`ValueError` unless the kernels can work on these: they see addresses only."""
    if new.dtype not in DTYPES or cache.dtype not in (new.dtype, torch.float8_e4m3fn):
        raise ValueError(f"no kernel for {_short(new.dtype)} with a cache of {_short(cache.dtype)}")
    if new.shape[-1] != cache.shape[4] or new.shape[-1] % 8 or cache.shape[1] != 2:
        raise ValueError(f"the cache {tuple(cache.shape)} does not fit {tuple(new.shape)}")
    size = meta.block_size
    if size != cache.shape[3] or size < 8 or size & (size - 1):
        raise ValueError(f"no kernel for blocks of {size} tokens in a cache {tuple(cache.shape)}")
    if not cache.is_contiguous() or cache.data_ptr() % 16:
        raise ValueError("the cache must be contiguous and begin at a multiple of 16 bytes")
    if cache.device != new.device:
        raise ValueError(f"the cache is on {cache.device}, what is new on {new.device}")


def _rows(new: Tensor) -> Tensor:
    """`new`, or a copy of it, such that each row is contiguous and begins at a multiple of 16 bytes."""
    step = new.stride(0) * new.element_size()
    in_place = new[:1].is_contiguous() and step % 16 == 0 and new.data_ptr() % 16 == 0
    return new if in_place else new.contiguous()


def _name(module: ModuleType) -> str:
    return module.__name__.split(".")[-1]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
