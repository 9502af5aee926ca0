"""`TorchRunner`: computes the steps of a plan with a Transformers model, on a CPU or on a GPU.

A step is one packed row of tokens, slices of different sequences end to end, without padding. On a CPU, which has
nothing to wait for, the host brings all of a step's inputs (`HostSteps`). On a GPU, and wherever the host is to run
ahead, sequences have their state on the device (`AheadSteps`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from batchjob.core.step_plan import StepPlan
from batchjob.engine.config import Capacity, EngineConfig
from batchjob.engine.kv_cache import KVCache, bytes_per_block, choose_num_blocks
from batchjob.engine.memory import bytes_for_cache, largest_step
from batchjob.engine.model.backends import choose_backend, fused_ops
from batchjob.engine.model.load import Forward, LoadedModel, load_model
from batchjob.engine.parallel.group import Group, one_try
from batchjob.engine.sampling.device_sampler import penalty_bytes
from batchjob.engine.steps.ahead_steps import AheadSteps, FollowerSteps
from batchjob.engine.steps.host_steps import HostSteps
from batchjob.engine.steps.step_inputs import StepInputs
from batchjob.errors import EngineError

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A CPU is busy with this many rows; more would only spread its cache. A GPU wants more work per launch.
_DEFAULT_MAX_NUM_SEQS = {"cpu": 128, "cuda": 512}
# Steps with prompts in them cannot be graphs. In a simulation of 256 slots this many steps between admissions leave a
# fifth of such steps, for one step in a hundred more; not measured on a GPU.
_GPU_ADMISSION_INTERVAL = 8
_DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


class TokenHandle:
    """A plan that has been started; its tokens are on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        """`tokens` int64 [num_steps, num_sampled]"""
        self._tokens = tokens
        self._event: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_ready(self) -> bool:
        """Whether `tokens` returns at once."""
        return self._event is None or self._event.query()

    def tokens(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.tolist()


class TorchRunner:
    """Implements `Runner`. Usable alone: `TorchRunner(path, config)`, `capacity()`, `execute(plan)`, `close()`."""

    def __init__(
        self, source: str | Path | Callable[[], nn.Module], config: EngineConfig, group: Group | None = None
    ) -> None:
        """`source` is a directory with a checkpoint, or builds a model: see `load_model`. With a `group` this process
        has one share of the model, and every rank makes a runner at the same time; see `ParallelRunner`.

        Raises UnsupportedModelError or EngineError; their messages say what to change.
        """
        self._device = _prepare_device(config)
        self._group = group
        self.seconds: dict[str, float] = {}  # that each part of the start took
        started = time.perf_counter()
        self._model, self._kv_dtype = self._load(source, config)
        forward = self._model.forward
        if config.deterministic:
            from batchjob.engine.invariant.fixed_rows import FixedRows

            forward = FixedRows(self._model, self._model.backend.module).forward
        if config.unknown_token_ids:  # after all comparisons of logits
            unknown = [token for token in config.unknown_token_ids if token < self._model.vocab_size]
            self._model.unknown_ids = torch.tensor(unknown, dtype=torch.int64, device=self._device)
        if group is not None:
            forward = one_try(forward)
        self.seconds["model"] = time.perf_counter() - started
        started = time.perf_counter()
        self._capacity, self._cache = self._allocate(config, forward)
        self.seconds["cache"] = time.perf_counter() - started
        started = time.perf_counter()
        parts = self._model, forward, self._cache, config
        max_num_seqs = self._capacity.max_num_seqs
        self._steps: AheadSteps | HostSteps | FollowerSteps
        if group is not None:
            kind = FollowerSteps if group.rank else AheadSteps
            self._steps = kind(*parts, max_num_seqs=max_num_seqs, group=group)
        elif _runs_ahead(config, self._device, self._model):
            self._steps = AheadSteps(*parts, max_num_seqs=max_num_seqs)
        else:
            self._steps = HostSteps(*parts, max_num_seqs=max_num_seqs)
        self.seconds["steps"] = time.perf_counter() - started

    def _load(
        self, source: str | Path | Callable[[], nn.Module], config: EngineConfig
    ) -> tuple[LoadedModel, torch.dtype]:
        dtype = _DTYPES[config.dtype]
        kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype
        model = load_model(
            source,
            dtype=dtype,
            device=self._device,
            max_model_len=config.max_model_len,
            choose_backend=lambda calls: choose_backend(
                config, calls, device=self._device, dtype=dtype, kv_dtype=kv_dtype
            ),
            block_size=config.block_size,
            # Fused parts multiply whole weights, past the sums over ranks that Transformers has put around its layers.
            use_fused=config.fuse and self._group is None,
            ops=fused_ops(self._device, deterministic=config.deterministic),
            tensor_parallel=1 if self._group is None else self._group.size,
        )
        logger.info("attention backend %s: %s", model.backend.name, model.backend.reason)
        return model, kv_dtype

    def _allocate(self, config: EngineConfig, forward: Forward) -> tuple[Capacity, KVCache]:
        kind, model = self._device.type, self._model
        max_num_seqs = config.halved(config.max_num_seqs or _DEFAULT_MAX_NUM_SEQS[kind])
        tokens = config.halved(
            config.max_num_batched_tokens or max(_DEFAULT_MAX_NUM_BATCHED_TOKENS[kind], max_num_seqs)
        )
        available = None
        if kind == "cuda":

            def run(num_tokens: int) -> object:
                return largest_step(
                    model, forward, num_tokens, max_num_seqs, config, kv_dtype=self._kv_dtype, device=self._device
                )

            available, tokens = bytes_for_cache(self._device, run if self._group is None else one_try(run), tokens)
            available = max(0, available - penalty_bytes(model.vocab_size, max_num_seqs))
        blocks_of_longest = -(-config.max_model_len // config.block_size)
        num_blocks = choose_num_blocks(
            bytes_per_block(model.shapes, block_size=config.block_size, dtype=self._kv_dtype),
            kv_cache_bytes=config.kv_cache_bytes,
            available=available,
            max_useful_blocks=max_num_seqs * blocks_of_longest,
            num_processes=1 if self._group is None else self._group.size,
        )
        if self._group is not None:
            num_blocks, tokens = self._group.least(num_blocks, tokens)
        num_blocks = config.halved(num_blocks, floor=blocks_of_longest)  # a row that fitted still fits
        max_num_seqs = min(max_num_seqs, num_blocks)
        cache = KVCache(
            model.shapes, num_blocks=num_blocks, block_size=config.block_size, dtype=self._kv_dtype, device=self._device
        )
        has_graphs = kind == "cuda" and config.cuda_graphs and not config.deterministic
        capacity = Capacity(
            num_blocks,
            config.block_size,
            max_num_seqs,
            tokens,
            model.vocab_size,
            self._describe(config, cache),
            admission_interval=config.admission_interval or (_GPU_ADMISSION_INTERVAL if has_graphs else 1),
            async_scheduling=kind == "cuda" if config.async_scheduling is None else config.async_scheduling,
        )
        return capacity, cache

    def _describe(self, config: EngineConfig, cache: KVCache) -> str:
        size = 1 if self._group is None else self._group.size
        where = f"{self._device}" if size == 1 else f"{size} {'GPUs' if self._device.type == 'cuda' else 'processes'}"
        parts = [
            f"{self._model.name} in {config.dtype} on {where}",
            f"KV cache of {cache.num_blocks * config.block_size:,} tokens ({size * cache.num_bytes / 2**30:.2f} GiB"
            + (", fp8)" if config.kv_cache_dtype == "fp8" else ")"),
        ]
        if self._device.type == "cpu":
            parts.append(f"{torch.get_num_threads()} threads" + (" each" if size > 1 else ""))
        if self._device.type != "cpu" or config.attention_backend != "auto" or config.deterministic:
            parts.append(f"attention by {self._model.backend.name}")
        if self._model.unfused:
            parts.append(f"slower layers (no fused form is known for {', '.join(self._model.unfused)})")
        if config.decode_steps_per_launch > 1:
            parts.append(f"{config.decode_steps_per_launch} decode steps per launch")
        if config.deterministic:
            parts.append("deterministic")
        return ", ".join(parts)

    def capacity(self) -> Capacity:
        return self._capacity

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> TokenHandle:
        """Starts the plan's steps; on a CPU they are over on return."""
        assert not isinstance(self._steps, FollowerSteps)
        return TokenHandle(self._steps.execute(plan))

    @torch.inference_mode()
    def follow(self, inputs: StepInputs) -> None:
        """The same on a rank of a group that is not the first, whose tokens it takes."""
        assert isinstance(self._steps, FollowerSteps)
        self._steps.follow(inputs)

    def close(self) -> None:
        """Drops model and cache. May be called twice."""
        self.__dict__.clear()


def _prepare_device(config: EngineConfig) -> torch.device:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if config.deterministic:
        from batchjob.engine.invariant.fixed_rows import set_switches

        set_switches()
    device = torch.device(config.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise EngineError(f"device {config.device!r} was asked for, but PyTorch sees no GPU")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)  # which does not take a device without a number
    return device


def _runs_ahead(config: EngineConfig, device: torch.device, model: LoadedModel) -> bool:
    return (
        device.type == "cuda"
        or bool(config.async_scheduling)
        or config.decode_steps_per_launch > 1
        or bool(model.backend.module.USES_DEVICE_LENS)
    )
