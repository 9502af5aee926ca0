"""`AheadSteps`: the host starts steps before it knows the tokens of the last ones. Sequences have their state, and are
sampled, on the device; the host sends what is new, and counts on what it knows: lengths and blocks."""

from __future__ import annotations

from torch import Tensor

from batchjob.core.step_plan import StepPlan
from batchjob.engine.config import EngineConfig
from batchjob.engine.kv_cache import KVCache
from batchjob.engine.model.load import Forward, LoadedModel
from batchjob.engine.parallel.group import Group
from batchjob.engine.sampling.device_sampler import DeviceSampler
from batchjob.engine.steps.device_state import DeviceState
from batchjob.engine.steps.device_steps import DeviceSteps
from batchjob.engine.steps.prefix_groups import MIN_TOKENS_SAVED
from batchjob.engine.steps.step_inputs import InputBuilder, StepInputs
from batchjob_kernels.triton_kernels import available as triton_here

# Tokens that a shared prefix must save its rows from reading before a step on a GPU leaves its graph for it.
# Estimated, not measured: a graph saves about 4 ms of launches, in which an H200 reads the keys and values of so many
# tokens.
_GPU_MIN_TOKENS_SAVED = 1 << 17


class AheadSteps:
    def __init__(
        self,
        model: LoadedModel,
        forward: Forward,
        cache: KVCache,
        config: EngineConfig,
        *,
        max_num_seqs: int,
        group: Group | None = None,
    ) -> None:
        """With a `group` the other ranks get what each step needs, and the tokens that it made."""
        self._group = group
        device = cache.layers[0].device
        is_gpu = device.type == "cuda"
        max_blocks_per_seq = -(-config.max_model_len // config.block_size)
        self._builder = InputBuilder(
            max_num_seqs=max_num_seqs,
            max_blocks_per_seq=max_blocks_per_seq,
            block_size=config.block_size,
            min_tokens_saved=None if config.deterministic else _GPU_MIN_TOKENS_SAVED if is_gpu else MIN_TOKENS_SAVED,
        )
        self.steps = device_steps(model, forward, cache, config, max_num_seqs=max_num_seqs)
        self._sampler = DeviceSampler(
            model.vocab_size,
            config.eos_token_ids,
            max_num_seqs=max_num_seqs,
            device=device,
            use_triton=is_gpu and triton_here.problem(device) is None,
        )

    def execute(self, plan: StepPlan) -> Tensor:
        """Starts the plan's steps; tokens int64 [num_steps, num_sampled] on the device."""
        inputs = self._builder.build(plan)
        for seq in self._builder.new:
            self._sampler.admit(seq)
        self._sampler.upload()
        if self._group is not None:
            self._group.send(inputs)
        return self.steps.run(inputs, self._draw)

    def _draw(
        self, logits: Tensor, rows: Tensor, num_output_tokens: Tensor, *, needs_ended: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens = self._sampler.sample(logits, self._sampler.mode, rows, num_output_tokens)
        ended = self._sampler.ended(tokens, rows, num_output_tokens) if needs_ended else None
        if self._group is not None:
            self._group.share(tokens, ended)
        return tokens, ended


class FollowerSteps:
    """Of the other ranks: runs what rank 0 has built, and takes its tokens."""

    def __init__(
        self,
        model: LoadedModel,
        forward: Forward,
        cache: KVCache,
        config: EngineConfig,
        *,
        max_num_seqs: int,
        group: Group,
    ) -> None:
        self._group = group
        self._steps = device_steps(model, forward, cache, config, max_num_seqs=max_num_seqs)

    def follow(self, inputs: StepInputs) -> None:
        self._steps.run(inputs, self._group.draw)


def device_steps(
    model: LoadedModel, forward: Forward, cache: KVCache, config: EngineConfig, *, max_num_seqs: int
) -> DeviceSteps:
    device = cache.layers[0].device
    state = DeviceState(
        max_num_seqs=max_num_seqs,
        max_blocks_per_seq=-(-config.max_model_len // config.block_size),
        block_size=config.block_size,
        null_block=cache.null_block,
        device=device,
    )
    return DeviceSteps(
        forward,
        cache,
        model.backend.module,
        state,
        has_device_lens=model.backend.module.USES_DEVICE_LENS,
        deterministic=config.deterministic,
        use_graphs=device.type == "cuda" and config.cuda_graphs and not config.deterministic,
        max_num_seqs=max_num_seqs,
    )
