"""`TorchRunner`: computes the steps of a plan with a Transformers model, on a CPU or on a GPU.

A step is one packed row of tokens, slices of different sequences end to end, without padding. Sequences have their
state on the device, and are sampled there; the host sends what is new (`InputBuilder`), and may start steps before it
knows the tokens of those before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from batchjob.core.step_plan import StepPlan
from batchjob.engine.config import Capacity, EngineConfig, StepOutput
from batchjob.engine.kv_cache import KVCache, bytes_per_block, choose_num_blocks
from batchjob.engine.memory import bytes_for_cache, largest_step, with_one_try, with_second_try
from batchjob.engine.model.backends import choose_backend, fused_ops
from batchjob.engine.model.load import Forward, LoadedModel, load_model
from batchjob.engine.sampling.sampler import Sampler, penalty_bytes
from batchjob.engine.steps.inputs import InputBuilder, StepInputs
from batchjob.engine.steps.prefix_groups import GPU_MIN_TOKENS_SAVED, MIN_TOKENS_SAVED, PrefixGroups
from batchjob.engine.steps.steps import Draw, Steps
from batchjob.errors import EngineError
from batchjob_kernels.triton_kernels import available as triton_here

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
        """True where `result` returns at once."""
        return self._event is None or self._event.query()

    def result(self) -> StepOutput:
        if self._event is not None:
            self._event.synchronize()
        return StepOutput(self._tokens.tolist())


class RankGroup(Protocol):
    """One process's place among those that a model is split over; see `parallel`."""

    size: int

    def least(self, *numbers: int) -> list[int]:
        """The smallest of each number among all processes."""
        ...

    def send(self, inputs: StepInputs) -> None:
        """Hands the inputs of a step to the other processes."""
        ...

    def shared(self, draw: Draw) -> Draw:
        """A draw that gives every process the tokens that the first one draws with `draw`."""
        ...


class TorchRunner:
    """Implements `Runner`. Usable alone: `TorchRunner(path, config)`, `capacity()`, `execute(plan)`, `close()`."""

    def __init__(
        self, source: str | Path | Callable[[], nn.Module], config: EngineConfig, group: RankGroup | None = None
    ) -> None:
        """`source` is a directory with a checkpoint, or builds a model: see `load_model`. With a `group` this process
        has one share of the model, and every rank makes a runner at the same time; see `ParallelRunner`.

        Raises UnsupportedModelError or EngineError; their messages say what to change.
        """
        self._num_threads = None if config.num_threads is None else torch.get_num_threads()
        self._device = _prepare_device(config)
        self._group = group
        self.seconds: dict[str, float] = {}  # that each part of the start took
        started = time.perf_counter()
        self._model, self._kv_dtype = self._load(source, config)
        forward = self._model.forward
        if config.deterministic:
            from batchjob.engine.invariant.forward import InvariantForward

            forward = InvariantForward(self._model, self._model.backend.module).forward
        if config.unknown_token_ids:  # after all comparisons of logits
            unknown = [token for token in config.unknown_token_ids if token < self._model.vocab_size]
            self._model.unknown_ids = torch.tensor(unknown, dtype=torch.int64, device=self._device)
        if group is not None:
            forward = with_one_try(forward)
        self.seconds["model"] = time.perf_counter() - started
        started = time.perf_counter()
        self._capacity, self._cache = self._allocate(config, forward)
        self.seconds["cache"] = time.perf_counter() - started
        started = time.perf_counter()
        self._builder = self._make_builder(config)
        self._sampler = self._make_sampler(config)
        self._steps = self._make_steps(config, forward if group is not None else with_second_try(forward))
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

            available, tokens = bytes_for_cache(self._device, run if self._group is None else with_one_try(run), tokens)
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

    def _make_builder(self, config: EngineConfig) -> InputBuilder:
        groups = None
        if not config.deterministic:
            is_gpu = self._device.type == "cuda"
            groups = PrefixGroups(config.block_size, GPU_MIN_TOKENS_SAVED if is_gpu else MIN_TOKENS_SAVED)
        return InputBuilder(
            max_num_seqs=self._capacity.max_num_seqs,
            max_blocks_per_seq=-(-config.max_model_len // config.block_size),
            groups=groups,
            sorts_rows=not self._model.backend.module.USES_DEVICE_LENS,
        )

    def _make_sampler(self, config: EngineConfig) -> Sampler:
        return Sampler(
            self._model.vocab_size,
            config.eos_token_ids,
            max_num_seqs=self._capacity.max_num_seqs,
            device=self._device,
            use_triton=self._device.type == "cuda" and triton_here.problem(self._device) is None,
        )

    def _make_steps(self, config: EngineConfig, forward: Forward) -> Steps:
        return Steps(
            forward,
            self._cache,
            self._model.backend.module,
            self._sampler.draw if self._group is None else self._group.shared(self._sampler.draw),
            max_num_seqs=self._capacity.max_num_seqs,
            max_blocks_per_seq=-(-config.max_model_len // config.block_size),
            deterministic=config.deterministic,
            use_graphs=self._device.type == "cuda" and config.cuda_graphs and not config.deterministic,
        )

    def capacity(self) -> Capacity:
        return self._capacity

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> TokenHandle:
        """Starts the plan's steps; on a CPU they are over on return."""
        inputs = self._builder.build(plan)
        self._sampler.prepare(self._builder.new_seqs, self._builder.slots)
        if self._group is not None:
            self._group.send(inputs)
        return TokenHandle(self._steps.run(inputs))

    @torch.inference_mode()
    def follow(self, inputs: StepInputs) -> None:
        """Runs a step that the first process of a group has sent, whose tokens it takes."""
        self._steps.run(inputs)

    def close(self) -> None:
        """Drops model and cache, and gives the process its number of threads back. May be called twice."""
        if (num_threads := self.__dict__.get("_num_threads")) is not None:
            torch.set_num_threads(num_threads)
        self.__dict__.clear()


def _prepare_device(config: EngineConfig) -> torch.device:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if config.deterministic:
        from batchjob.engine.invariant.forward import set_switches

        set_switches()
    device = torch.device(config.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise EngineError(f"device {config.device!r} was asked for, but PyTorch sees no GPU")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)  # which does not take a device without a number
    return device
