"""`TorchRunner`: computes the steps of a plan with a Transformers model, on a CPU or one GPU.

A step is one packed row of tokens, slices of different sequences end to end, without padding. Slices are laid out so
that sequences that share blocks, and decode rows of about one length, are neighbours (`layout`); results go back in
the plan's order.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from batchjob.core.plan import StepPlan
from batchjob.engine.attention import StepContext
from batchjob.engine.config import Capacity, EngineConfig
from batchjob.engine.kv_cache import KVCache, bytes_per_block, choose_num_blocks
from batchjob.engine.model import load_model
from batchjob.engine.packing import Packer
from batchjob.engine.sampler import Sampler
from batchjob.errors import EngineError
from batchjob_kernels import gather

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A CPU is busy with this many rows; more would only spread its cache. A GPU wants more work per launch.
_DEFAULT_MAX_NUM_SEQS = {"cpu": 128, "cuda": 512}
_DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


class TokenHandle:
    """A step that is done; its tokens may still be on the device."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def tokens(self) -> list[int]:
        return self._tokens.tolist()


class TorchRunner:
    """Implements `Runner`. Usable alone: `TorchRunner(path, config)`, `capacity()`, `execute(plan)`, `close()`."""

    def __init__(self, model_path: str | Path, config: EngineConfig) -> None:
        """Raises UnsupportedModelError or EngineError; their messages say what to change."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._device = torch.device(config.device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise EngineError(f"device {config.device!r} was asked for, but PyTorch sees no GPU")
        dtype = _DTYPES[config.dtype]
        self._model = load_model(
            model_path, dtype=dtype, device=self._device, max_model_len=config.max_model_len, backend=gather
        )
        self._capacity, self._cache = self._allocate(config, dtype)
        self._packer = Packer(
            max_num_seqs=self._capacity.max_num_seqs,
            max_blocks_per_seq=-(-config.max_model_len // config.block_size),
            block_size=config.block_size,
            null_block=self._cache.null_block,
            device=self._device,
        )
        self._sampler = Sampler(self._model.vocab_size, config.eos_token_ids, self._device)

    def _allocate(self, config: EngineConfig, dtype: torch.dtype) -> tuple[Capacity, KVCache]:
        kind = self._device.type
        max_num_seqs = config.halved(config.max_num_seqs or _DEFAULT_MAX_NUM_SEQS[kind])
        blocks_of_longest = -(-config.max_model_len // config.block_size)
        block_bytes = bytes_per_block(self._model.shapes, block_size=config.block_size, dtype=dtype)
        num_blocks = choose_num_blocks(
            block_bytes,
            kv_cache_bytes=config.kv_cache_bytes,
            max_useful_blocks=max_num_seqs * blocks_of_longest,
            device=self._device,
        )
        num_blocks = config.halved(num_blocks, floor=blocks_of_longest)  # a row that fitted still fits
        max_num_seqs = min(max_num_seqs, num_blocks)
        cache = KVCache(
            self._model.shapes, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, device=self._device
        )
        description = (
            f"{self._model.name} in {config.dtype} on {self._device}, KV cache of {num_blocks * config.block_size:,} "
            f"tokens ({cache.num_bytes / 2**30:.2f} GiB)"
        )
        if kind == "cpu":
            description += f", {torch.get_num_threads()} threads"
        tokens = config.max_num_batched_tokens or max(_DEFAULT_MAX_NUM_BATCHED_TOKENS[kind], max_num_seqs)
        return (
            Capacity(
                num_blocks,
                config.block_size,
                max_num_seqs,
                config.halved(tokens),
                self._model.vocab_size,
                description,
            ),
            cache,
        )

    def capacity(self) -> Capacity:
        return self._capacity

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> TokenHandle:
        """Runs one step; on a CPU it is finished on return."""
        packed = self._packer.pack(plan)
        step = StepContext(packed.meta, self._cache, gather)
        logits = self._model.forward(packed.input_ids, packed.positions, packed.keep, step)
        return TokenHandle(self._sampler.sample(logits, [piece.seq for piece in plan.sampled]))

    def close(self) -> None:
        """Drops model and cache. May be called twice."""
        self.__dict__.clear()
