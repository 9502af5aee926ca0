"""`HostSteps`: the host brings all inputs of a step and waits for its tokens. For a CPU, with nothing to hide."""

from __future__ import annotations

from torch import Tensor

from batchjob.core.plan import StepPlan
from batchjob.engine.attention import StepContext
from batchjob.engine.config import EngineConfig
from batchjob.engine.kv_cache import KVCache
from batchjob.engine.model import Forward, LoadedModel
from batchjob.engine.packing import Packer
from batchjob.engine.sampler import Sampler


class HostSteps:
    def __init__(
        self, model: LoadedModel, forward: Forward, cache: KVCache, config: EngineConfig, *, max_num_seqs: int
    ) -> None:
        device = cache.layers[0].device
        self._forward = forward
        self._backend = model.backend.module
        self._cache = cache
        self._packer = Packer(
            max_num_seqs=max_num_seqs,
            max_blocks_per_seq=-(-config.max_model_len // config.block_size),
            block_size=config.block_size,
            null_block=cache.null_block,
            device=device,
        )
        self._sampler = Sampler(model.vocab_size, config.eos_token_ids, device)

    def execute(self, plan: StepPlan) -> Tensor:
        """Tokens int64 [1, num_sampled]."""
        assert plan.num_steps == 1
        packed = self._packer.pack(plan)
        step = StepContext(packed.meta, self._cache, self._backend)
        logits = self._forward(packed.input_ids, packed.positions, packed.keep, step)
        return self._sampler.sample(logits, [piece.seq for piece in plan.sampled])[None]
