"""The settings of an engine (`EngineConfig`), the limits that a runner found (`Capacity`), and the seams between them.

Everything here is plain data and protocols; it imports no torch, so that a job with the fake runner never does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from batchjob.spec import JobSpec

if TYPE_CHECKING:
    from batchjob.core.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Resolved settings of one engine. None means "the runner decides from the device and its memory"."""

    max_model_len: int  # most tokens of prompt plus output; a cap, never a reservation
    max_num_seqs: int | None = None  # most sequences in one step
    max_num_batched_tokens: int | None = None  # most tokens computed in one step
    block_size: int = 16  # tokens per KV block
    kv_cache_bytes: int | None = None  # memory for keys and values of all layers
    prefix_caching: bool = True  # share KV blocks between rows whose prompts start alike
    dtype: str = "float32"  # of weights, activations and KV: "float32" | "bfloat16" | "float16"
    device: str = "cpu"  # "cpu" | "cuda" | "cuda:N"
    eos_token_ids: tuple[int, ...] = ()  # end tokens of generation_config, config and tokenizer together
    unknown_token_ids: tuple[int, ...] = ()  # ids that the model has and its tokenizer has not: never drawn
    num_threads: int | None = None  # CPU threads of the engine; None leaves torch's choice, one per core
    memory_backoff: int = 0  # how often the limits, given or found, are halved: memory ran out with them before
    attention_backend: str = "auto"  # "auto" | a name of batchjob_kernels.attention.select.BACKENDS
    kv_cache_dtype: str = "auto"  # "auto" (that of the model) | "fp8"
    fuse: bool = True  # swap parts of the model for faster ones where they give the same
    cuda_graphs: bool = True  # replay decode steps as CUDA graphs; no effect on a CPU
    async_scheduling: bool | None = None  # start the next step before the last one's tokens are known; None: on a GPU
    admission_interval: int | None = None  # steps between admissions while slots are scarce; None: the runner decides
    decode_steps_per_launch: int = 1  # decode steps that the host starts at once
    deterministic: bool = False  # results that do not depend, in any bit, on what else is in a step
    tensor_parallel: int = 1  # processes that hold a share of the model each

    @classmethod
    def of(cls, spec: JobSpec, settings: object, **found: Any) -> EngineConfig:
        """Returns the config of a job's engine: each field comes from `found`, from the resolved `settings`, or from
        `spec`, the first of them that has a value of its name, else it has its default."""
        values = {
            field.name: getattr(source, field.name)
            for source in (spec, settings)
            for field in fields(cls)
            if hasattr(source, field.name)
        }
        values["async_scheduling"] = {"auto": None, "on": True, "off": False}[spec.async_scheduling]
        return cls(**{**values, **found})

    def halved(self, number: int, *, floor: int = 1) -> int:
        """Returns a limit after `memory_backoff` halvings, but not below `floor` if it was above."""
        return max(min(number, floor), number >> self.memory_backoff)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a runner, found after the model is loaded. Sizes the scheduler; never written back to a spec."""

    num_blocks: int  # usable KV blocks; a block that the runner keeps for itself is not counted
    block_size: int  # tokens per block
    max_num_seqs: int  # rows of the runner's slot tables: 0 <= Sequence.slot < max_num_seqs
    max_num_batched_tokens: int
    vocab_size: int  # width of the logits
    description: str  # one line for the header: device, dtype, KV memory
    admission_interval: int = 1  # steps between admissions of new rows while slots are scarce
    async_scheduling: bool = False  # a step may be started before the tokens of the one before it are known


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a plan: for each of its `num_steps`, one entry per slice of `plan.sampled`.

    The token `tasks.base.NOT_FINITE` stands for "the logits of this row are not finite numbers": the row fails, the
    others go on. The tokens of a row after the one that ends it have no meaning. `logprobs` and `values` are None
    where the task asks for none.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]] | None = None  # of these tokens
    values: list[list[list[float]]] | None = None  # the numbers that a task asks for: scores, an embedding


class Handle(Protocol):
    """A plan that has been started."""

    def result(self) -> StepOutput:
        """Waits for the plan and returns its results."""
        ...


class Runner(Protocol):
    """Computes steps. Knows nothing of queues, text or files.

    Sequences keep their `slot` from admission until they finish or are preempted, so that a runner may keep state
    per slot; a slot's state is stale when another sequence (by identity) or a lower `num_computed` appears in it.
    """

    def capacity(self) -> Capacity:
        """Constant for the life of the runner."""
        ...

    def execute(self, plan: StepPlan) -> Handle:
        """Starts one step, or as many in a row as the plan says.

        With `async_scheduling` the step before it may still be in flight, and its tokens unknown to the host; without,
        the plan's sequences do not change until the handle's `result()` has returned.
        """
        ...

    def close(self) -> None:
        """Frees memory, threads and processes. May be called twice."""
        ...
