"""`HostSteps`: the host brings all inputs of a step and waits for its tokens. For a CPU, with nothing to hide."""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob.core.step_plan import StepPlan
from batchjob.engine.config import EngineConfig
from batchjob.engine.kv_cache import KVCache
from batchjob.engine.model.attention_hook import StepContext
from batchjob.engine.model.load import Forward, LoadedModel
from batchjob.engine.sampling.sampler import Sampler
from batchjob.engine.steps.nonfinite import BrokenBlocks
from batchjob.engine.steps.packing import Packer


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
        self._broken = BrokenBlocks(cache)

    def execute(self, plan: StepPlan) -> Tensor:
        """Tokens int64 [1, num_sampled]."""
        assert plan.num_steps == 1
        packed = self._packer.pack(plan)
        meta = packed.meta
        step = StepContext(meta, self._cache, self._backend, watches=not plan.decode_only)
        logits = self._forward(packed.input_ids, packed.positions, packed.keep, step)
        tokens = self._sampler.sample(logits, [piece.seq for piece in plan.sampled])
        self._broken.begin(meta.slot_mapping)
        if step.broken is not None:
            self._broken.note(meta.slot_mapping, step.broken)
            sequences = packed.sequences
            kv_lens = torch.tensor(meta.kv_lens, device=meta.slot_mapping.device)[sequences]
            tokens = torch.where(self._broken.read_by(meta.block_table[sequences], kv_lens), -1, tokens)
        return tokens[None]
