"""`DeviceSteps`: runs steps whose inputs are on the device and stay there: nothing in here waits for the device.

Decode steps take everything from `DeviceState`, by the rows of their sequences, so that several can be started one
after the other, and so that each is a CUDA graph where there is one for its size. Other steps bring their own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from batchjob.engine.kv_cache import KVCache
from batchjob.engine.memory import retry_without_cached_memory
from batchjob.engine.model.attention_hook import StepContext
from batchjob.engine.steps.device_state import DeviceState
from batchjob.engine.steps.graphs import DecodeGraphs
from batchjob.engine.steps.nonfinite import BrokenBlocks
from batchjob.engine.steps.step_inputs import StepInputs
from batchjob_kernels import AttnMeta, DeviceLens

Forward = Callable[[Tensor, Tensor, Tensor, StepContext], Tensor]


class Draw(Protocol):
    """Samples: logits [n, vocab], rows int64 [n] and output tokens so far int32 [n] -> tokens int64 [n], and which rows
    they end, bool [n]; the latter only if `needs_ended`."""

    def __call__(
        self, logits: Tensor, rows: Tensor, num_output_tokens: Tensor, *, needs_ended: bool
    ) -> tuple[Tensor, Tensor | None]: ...


class DecodeBatch:
    """The tensors of a decode step of one size, filled in place by `fill`: a captured graph reads and writes these."""

    def __init__(self, size: int, state: DeviceState) -> None:
        device = state.device
        self.dummy = state.dummy
        self.rows = torch.full((size,), state.dummy, dtype=torch.int64, device=device)
        self.table_rows = torch.empty(size, dtype=torch.int32, device=device)
        self.kv_lens = torch.ones(size, dtype=torch.int32, device=device)
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(size, dtype=torch.int64, device=device)
        self.keep = torch.arange(size, device=device)
        self.meta = AttnMeta(
            query_lens=[1] * size,
            kv_lens=[1] * size,
            block_table=state.block_table,
            slot_mapping=self.slot_mapping,
            block_size=state.block_size,
            device_lens=DeviceLens(
                torch.arange(size + 1, dtype=torch.int32, device=device), self.kv_lens, self.table_rows
            ),
        )

    def fill(self, state: DeviceState) -> None:
        """From `rows` and what the device knows of them."""
        rows = self.rows
        self.table_rows.copy_(rows)
        torch.index_select(state.kv_lens, 0, rows, out=self.kv_lens)
        torch.index_select(state.last_tokens, 0, rows, out=self.ids)
        self.positions.copy_(self.kv_lens)
        self.positions.sub_(1)
        self.slot_mapping.copy_(state.slot_mapping(rows, self.positions))


class DeviceSteps:
    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        backend: ModuleType,
        state: DeviceState,
        *,
        has_device_lens: bool,
        deterministic: bool,
        use_graphs: bool,
        max_num_seqs: int,
    ) -> None:
        """`has_device_lens`: whether the backend reads lengths and tables of all slots on the device."""
        self._forward = forward
        self._cache = cache
        self._backend = backend
        self._state = state
        self._has_device_lens = has_device_lens
        self._deterministic = deterministic
        self._broken = BrokenBlocks(cache)
        self._batch: DecodeBatch | None = None  # of the last decode step without a graph
        self.graphs = DecodeGraphs(self._make_batch, self._run_batch, max_num_seqs) if use_graphs else None

    def run(self, inputs: StepInputs, draw: Draw) -> Tensor:
        """Starts the steps of a plan; tokens int64 [num_steps, num_sampled], in the plan's order."""
        parts = self._state.receive(inputs)
        if inputs.is_decode:
            return self._decode(inputs, draw)
        logits = self._mixed(inputs, parts)
        state, sampled = self._state, parts["sampled"].long()
        if not len(sampled):
            return torch.empty(1, 0, dtype=torch.int64, device=state.device)
        rows, kv_lens = parts["rows"].long()[sampled], parts["stops"][sampled]
        tokens, _ = draw(logits, rows, state.num_output_tokens(rows, kv_lens), needs_ended=False)
        tokens = torch.where(self._broken.read_by(state.block_table[rows], kv_lens), -1, tokens)
        state.advance(rows, tokens, kv_lens)
        return tokens[None]

    def _decode(self, inputs: StepInputs, draw: Draw) -> Tensor:
        state, rows, steps = self._state, self._state.rows, []
        for step in range(inputs.num_steps):
            kv_lens = state.kv_lens[rows]
            logits = self._decode_logits(inputs, rows, kv_lens, step)
            is_last = step == inputs.num_steps - 1
            tokens, ended = draw(logits, rows, state.num_output_tokens(rows, kv_lens), needs_ended=not is_last)
            state.advance(rows, tokens, kv_lens)
            steps.append(tokens)
            if ended is not None:
                rows = torch.where(ended, state.dummy, rows)
        return torch.stack(steps)

    def _decode_logits(self, inputs: StepInputs, rows: Tensor, kv_lens: Tensor, step: int) -> Tensor:
        size, state = len(rows), self._state
        if not self._has_device_lens:
            positions = kv_lens.long() - 1
            meta = self._meta(inputs, rows, kv_lens, positions, rows, step)
            self._broken.begin(meta.slot_mapping)
            keep = torch.arange(size, device=state.device)
            return self._call(state.last_tokens[rows], positions, keep, self._context(meta))
        if self.graphs is not None:
            logits = self.graphs.run(rows)
            if logits is not None:
                return logits
        if self._batch is None or len(self._batch.rows) != size:
            self._batch = self._make_batch(size)
        self._batch.rows.copy_(rows)
        return self._run_batch(self._batch)

    def _mixed(self, inputs: StepInputs, parts: dict[str, Tensor]) -> Tensor:
        state = self._state
        ids, positions, token_rows = parts["ids"].long(), parts["positions"].long(), parts["token_rows"].long()
        decode_at = parts["decode_at"].long()
        ids.index_copy_(0, decode_at, state.last_tokens[token_rows[decode_at]])
        meta = self._meta(inputs, token_rows, parts["stops"], positions, parts["rows"].long(), 0, parts["query_starts"])
        step = self._context(meta)
        step.watches = True
        logits = self._call(ids, positions, parts["keep"].long(), step)
        self._broken.begin(meta.slot_mapping)
        assert step.broken is not None
        self._broken.note(meta.slot_mapping, step.broken)
        return logits

    def _meta(
        self,
        inputs: StepInputs,
        token_rows: Tensor,
        kv_lens: Tensor,
        positions: Tensor,
        rows: Tensor,
        step: int,
        query_starts: Tensor | None = None,
    ) -> AttnMeta:
        """`token_rows` and `positions` are by token, `rows` and `kv_lens` by sequence."""
        state = self._state
        meta = AttnMeta(
            query_lens=inputs.query_lens,
            kv_lens=[min(length + step, state.max_kv_len) for length in inputs.kv_lens],
            block_table=state.block_table,
            slot_mapping=state.slot_mapping(token_rows, positions),
            block_size=state.block_size,
            contexts=inputs.contexts,
            deterministic=self._deterministic,
        )
        if self._has_device_lens:
            if query_starts is None:
                query_starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=state.device)
            meta.device_lens = DeviceLens(query_starts, kv_lens, rows.int())
        else:
            meta.block_table = state.block_table[rows]
        return meta

    def _context(self, meta: AttnMeta) -> StepContext:
        return StepContext(meta, self._cache, self._backend)

    def _call(self, ids: Tensor, positions: Tensor, keep: Tensor, step: StepContext) -> Tensor:
        return retry_without_cached_memory(lambda: self._forward(ids, positions, keep, step))

    # -- a decode step as a whole, for graphs

    def _make_batch(self, size: int) -> DecodeBatch:
        batch = DecodeBatch(size, self._state)
        batch.meta.deterministic = self._deterministic
        return batch

    def _run_batch(self, batch: DecodeBatch) -> Tensor:
        batch.fill(self._state)
        batch.meta.memo.clear()  # some hold copies of the tensors that were filled: a graph has to make them itself
        self._broken.begin(batch.slot_mapping)
        return self._call(batch.ids, batch.positions, batch.keep, self._context(batch.meta))
