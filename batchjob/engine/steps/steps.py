"""`Steps`: runs the steps of plans on a device. Inputs and sampled tokens stay there; nothing here waits for it.

Decode steps take everything from `DeviceState`, by the slots of their sequences. So several can be started one after
the other, and each is a CUDA graph where there is one for its size. Other steps bring their own tokens.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from batchjob.engine.kv_cache import KVCache
from batchjob.engine.model.attention_hook import StepContext
from batchjob.engine.model.load import Forward
from batchjob.engine.steps.decode_batch import DecodeBatch
from batchjob.engine.steps.graphs import DecodeGraphs
from batchjob.engine.steps.inputs import StepInputs, StepTensors
from batchjob.engine.steps.nonfinite import NonfiniteBlocks
from batchjob.engine.steps.state import DeviceState
from batchjob_kernels import AttnMeta, DeviceLens


class Draw(Protocol):
    """Samples one token per row of logits. A process of tensor parallelism may get its tokens from another one."""

    def __call__(
        self, logits: Tensor, slots: Tensor, num_output_tokens: Tensor, *, needs_ended: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`logits` [n, vocab], `slots` int64 [n], `num_output_tokens` int32 [n] before this token -> the tokens int64
        [n], and with `needs_ended` also the rows that they end, bool [n]."""
        ...


class Steps:
    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        backend: ModuleType,
        draw: Draw,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        deterministic: bool,
        use_graphs: bool,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._backend = backend
        self._draw = draw
        self._deterministic = deterministic
        self._state = DeviceState(cache, max_num_seqs=max_num_seqs, max_blocks_per_seq=max_blocks_per_seq)
        self._nonfinite = NonfiniteBlocks(cache)
        self._batch: DecodeBatch | None = None  # of the last decode step without a graph
        self.graphs = DecodeGraphs(self._make_batch, self._run_batch, max_num_seqs) if use_graphs else None

    def run(self, inputs: StepInputs) -> Tensor:
        """Starts the steps of a plan; tokens int64 [num_steps, num_sampled], in the plan's order."""
        sent = self._state.receive(inputs)
        return self._decode(inputs) if inputs.is_decode else self._mixed(inputs, sent)

    # -- steps of decodes alone

    def _decode(self, inputs: StepInputs) -> Tensor:
        state = self._state
        slots, order, steps = state.decode_slots, state.decode_order, []
        for step in range(inputs.num_steps):
            kv_lens = state.kv_lens[slots]
            logits = self._decode_logits(inputs, slots, kv_lens, step)
            is_last = step == inputs.num_steps - 1
            num_output_tokens = state.num_output_tokens(slots, kv_lens)
            tokens, ended = self._draw(logits, slots, num_output_tokens, needs_ended=not is_last)
            state.advance(slots, tokens, kv_lens)
            steps.append(tokens)
            if ended is not None:
                slots = torch.where(ended, state.dummy, slots)
        tokens = torch.stack(steps)
        return tokens if order is None else tokens[:, order]

    def _decode_logits(self, inputs: StepInputs, slots: Tensor, kv_lens: Tensor, step: int) -> Tensor:
        """The logits of decode step number `step` of the inputs: from a graph, from a batch of fixed tensors, or with
        the lists that backends without device lengths, and contexts, need."""
        size, state = len(slots), self._state
        if inputs.contexts or not self._backend.USES_DEVICE_LENS:
            query_starts = torch.arange(size + 1, dtype=torch.int32, device=state.device)
            positions = kv_lens.long() - 1
            meta = self._meta(inputs, slots, kv_lens, query_starts, state.slot_mapping(slots, positions), step)
            self._nonfinite.begin(meta.slot_mapping)
            return self._forward(state.last_tokens[slots], positions, query_starts[:-1].long(), self._context(meta))
        if self.graphs is not None:
            logits = self.graphs.run(slots)
            if logits is not None:
                return logits
        if self._batch is None or len(self._batch.slots) != size:
            self._batch = self._make_batch(size)
        self._batch.slots.copy_(slots)
        return self._run_batch(self._batch)

    def _make_batch(self, size: int) -> DecodeBatch:
        return DecodeBatch(size, self._state, deterministic=self._deterministic)

    def _run_batch(self, batch: DecodeBatch) -> Tensor:
        """The logits of a batch whose slots are set; may be captured."""
        batch.fill(self._state)
        self._nonfinite.begin(batch.slot_mapping)
        return self._forward(batch.ids, batch.positions, batch.logit_positions, self._context(batch.meta))

    # -- steps with prompt tokens in them

    def _mixed(self, inputs: StepInputs, sent: StepTensors) -> Tensor:
        state, slots, sampled = self._state, sent.slots.long(), sent.sampled.long()
        logits = self._mixed_logits(inputs, sent, slots)
        if not len(sampled):
            return torch.empty(1, 0, dtype=torch.int64, device=state.device)
        slots, kv_lens = slots[sampled], sent.kv_lens[sampled]
        tokens, _ = self._draw(logits, slots, state.num_output_tokens(slots, kv_lens), needs_ended=False)
        is_nonfinite = self._nonfinite.read_by(state.blocks_of(slots, max(inputs.kv_lens)), kv_lens)
        tokens = torch.where(is_nonfinite, -1, tokens)
        state.advance(slots, tokens, kv_lens)
        return tokens[None]

    def _mixed_logits(self, inputs: StepInputs, sent: StepTensors, slots: Tensor) -> Tensor:
        state = self._state
        ids, positions, token_slots = sent.ids.long(), sent.positions.long(), sent.token_slots.long()
        decode_at = sent.decode_at.long()
        ids.index_copy_(0, decode_at, state.last_tokens[token_slots[decode_at]])
        slot_mapping = state.slot_mapping(token_slots, positions)
        context = self._context(self._meta(inputs, slots, sent.kv_lens, sent.query_starts, slot_mapping))
        context.check_finite = True
        logits = self._forward(ids, positions, sent.logit_positions.long(), context)
        self._nonfinite.begin(slot_mapping)
        assert context.nonfinite is not None
        self._nonfinite.note(slot_mapping, context.nonfinite)
        return logits

    # -- both

    def _meta(
        self,
        inputs: StepInputs,
        slots: Tensor,
        kv_lens: Tensor,
        query_starts: Tensor,
        slot_mapping: Tensor,
        step: int = 0,
    ) -> AttnMeta:
        """`slots`, `kv_lens` and `query_starts` go by sequence, `slot_mapping` by token."""
        state = self._state
        host_lens = [min(length + step, state.max_kv_len) for length in inputs.kv_lens]
        meta = AttnMeta(
            query_lens=inputs.query_lens,
            kv_lens=host_lens,
            block_table=state.block_table,
            slot_mapping=slot_mapping,
            block_size=state.block_size,
            contexts=inputs.contexts,
            deterministic=self._deterministic,
        )
        if self._backend.USES_DEVICE_LENS:
            meta.device_lens = DeviceLens(query_starts, kv_lens, slots.int())
        else:
            meta.block_table = state.blocks_of(slots, max(host_lens))
        return meta

    def _context(self, meta: AttnMeta) -> StepContext:
        return StepContext(meta, self._cache, self._backend)
