"""Measures the memory of a GPU that is left for the KV cache, after a step of the largest size that may come."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from batchjob.engine.config import EngineConfig
from batchjob.engine.kv_cache import KVCache
from batchjob.engine.model.attention_hook import StepContext
from batchjob.engine.model.load import Forward, LoadedModel
from batchjob.errors import EngineError
from batchjob_kernels import AttnMeta, DeviceLens

logger = logging.getLogger(__name__)

# Left free beside what a worst-case step took: CUDA graphs, workspaces of libraries, fragmentation.
_RESERVE_BYTES = 512 << 20
_RESERVE_SHARE = 0.02  # of the device

P = ParamSpec("P")
T = TypeVar("T")


def with_second_try(function: Callable[P, T]) -> Callable[P, T]:
    """Calls `function` once more after memory ran out, without the memory that PyTorch keeps for later: fragmentation
    may be all that is wrong.

    Not while a CUDA graph is captured: giving memory back would spoil the capture and hide why it failed.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except torch.OutOfMemoryError:
            if torch.cuda.is_current_stream_capturing():
                raise
        # Outside of the handler: there, the error would still hold the frames of the first try, and their tensors.
        torch.cuda.empty_cache()
        return function(*args, **kwargs)

    return call


def with_one_try(function: Callable[P, T]) -> Callable[P, T]:
    """Raises EngineError where memory ran out: for a process of tensor parallelism, which must not try again by itself.

    The others are further on, and the sums of the second try would be sums with other layers. So it ends the attempt;
    with less in a step, the next one may do better.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"out of memory in a model that is split over processes: {error}") from error

    return call


def bytes_for_cache(
    device: torch.device, run_largest_step: Callable[[int], object], num_tokens: int
) -> tuple[int, int]:
    """(bytes that the KV cache may take, tokens that a step may have).

    `run_largest_step` runs a step of so many tokens; where memory runs out in it, half as many are tried.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    while True:
        torch.cuda.reset_peak_memory_stats(device)
        try:
            run_largest_step(num_tokens)
            torch.cuda.synchronize(device)
            break
        except torch.OutOfMemoryError:
            if num_tokens <= 256:
                raise
            logger.warning("a step of %d tokens does not fit into memory: trying half as many", num_tokens)
            num_tokens //= 2
        finally:
            torch.cuda.empty_cache()
    peak = torch.cuda.max_memory_allocated(device) - before
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - peak - _RESERVE_BYTES - int(total * _RESERVE_SHARE)), num_tokens


@torch.inference_mode()
def largest_step(
    model: LoadedModel,
    forward: Forward,
    num_tokens: int,
    max_num_seqs: int,
    config: EngineConfig,
    *,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """One step of `num_tokens` prompt tokens, in sequences as long as they may be, with logits for as many rows as may
    be sampled at once, and what a sampler makes of them: the most memory that a step takes beside weights and cache.

    All sequences share one block table, of a cache of their size: what they read has no meaning.
    """
    size = config.block_size
    longest = min(num_tokens, config.max_model_len - 1)
    lens = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
    num_blocks = -(-longest // size)
    cache = KVCache(model.shapes, num_blocks=num_blocks, block_size=size, dtype=kv_dtype, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lens])
    table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    has_device_lens = model.backend.module.USES_DEVICE_LENS
    meta = AttnMeta(
        query_lens=lens,
        kv_lens=lens,
        block_table=table if has_device_lens else table.expand(len(lens), -1),
        slot_mapping=positions,
        block_size=size,
        device_lens=DeviceLens.of(lens, lens, [0] * len(lens), device) if has_device_lens else None,
        deterministic=config.deterministic,
    )
    logit_positions = torch.arange(min(max_num_seqs, num_tokens), device=device)
    step = StepContext(meta, cache, model.backend.module)
    logits = forward(torch.zeros_like(positions), positions, logit_positions, step)
    torch.softmax(logits.float(), dim=1)
