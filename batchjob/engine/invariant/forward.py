"""`InvariantForward`: computes a step so that a row's logits do not depend, in any bit, on what else the step holds.

How a product is rounded follows its shape, and how an elementwise operation is rounded may follow where in memory a
number lies. So a step is computed in blocks of exactly `ROWS` rows, one forward after the other, the last one padded:
one shape for every operation of the model, whatever the step. Rows of a sequence see those of earlier blocks through
the cache, as they see earlier steps. Attention has a backend of its own for it. That the place within a block does not
matter is proven at load, with the model, threads and device at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from batchjob.engine.invariant.parts import ROWS, make_invariant, repeatable, set_switches
from batchjob.engine.kv_cache import KVCache
from batchjob.engine.model.attention_hook import StepContext
from batchjob.engine.model.checkpoint import described
from batchjob.engine.model.load import LoadedModel, packed_forward
from batchjob.engine.model.load_check import logits_problem, packed_logits
from batchjob.errors import UnsupportedModelError
from batchjob_kernels import AttnMeta
from batchjob_kernels.attention.invariant_products import single_thread

__all__ = ["ROWS", "InvariantForward", "make_invariant", "set_switches"]

_PROOF_LEN = 2  # tokens of the sequence that the proof computes


class InvariantForward:
    """Takes a loaded model over: it must not be called directly afterwards."""

    def __init__(self, model: LoadedModel, backend: ModuleType, *, block_size: int = 16) -> None:
        """Changes the model in place. `block_size` is that of the KV blocks that are used to check it.

        Raises UnsupportedModelError where nothing can be promised.
        """
        self._model, self._backend, self._block_size = model, backend, block_size
        self._device = next(model.module.parameters()).device

        def logits() -> list[Tensor]:
            return packed_logits(model.module, model.shapes, backend, packed_forward, block_size)

        expected = logits()
        make_invariant(model.module)
        try:
            self._check(expected)
            self._prove()
        except RuntimeError as error:  # an operation that adds in no fixed order, or a layer of another form
            raise UnsupportedModelError(f"{model.name} cannot run with --deterministic: {described(error)}") from error

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, logit_positions: Tensor, step: StepContext) -> Tensor:
        """As `LoadedModel.forward`. Contexts of the step are not used; lengths on the device are waited for."""
        assert step.meta is not None
        assert step.cache is not None
        kept = logit_positions.tolist()
        parts: list[Tensor] = []
        order: list[int] = []  # rows of `parts`, as rows of the step
        nonfinite: list[Tensor] = []
        with single_thread(), repeatable():
            for block in _blocks(step.meta, step.cache.null_block):
                wanted = [row for row in kept if block.start <= row < block.stop]
                # Logits of all rows or of none, so that they too are products of one shape.
                rows = torch.arange(ROWS if wanted else 0, device=input_ids.device)
                own = StepContext(block.meta, step.cache, self._backend, check_finite=step.check_finite)
                ids = block.padded(input_ids)
                logits = self._model.forward(ids, block.padded(positions), rows, own)
                parts.append(logits[[row - block.start for row in wanted]])
                order += wanted
                if own.nonfinite is not None:
                    nonfinite.append(own.nonfinite[: block.stop - block.start])
        if nonfinite:
            step.nonfinite = torch.cat(nonfinite)
        place = {row: index for index, row in enumerate(order)}
        return torch.cat(parts)[[place[row] for row in kept]]

    def _check(self, expected: list[Tensor]) -> None:
        """Checks that the model, changed and in blocks, still gives what it gave, which is `expected`."""

        def forward(_: nn.Module, ids: Tensor, positions: Tensor, logit_positions: Tensor, step: StepContext) -> Tensor:
            return self.forward(ids, positions, logit_positions, step)

        actual = packed_logits(self._model.module, self._model.shapes, self._backend, forward, self._block_size)
        if problem := logits_problem(expected, actual):
            raise UnsupportedModelError(f"{self._model.name} gives {problem} with --deterministic")

    def _prove(self) -> None:
        """One sequence is decoded in every row of a block at once, and computed whole across two blocks beside another,
        whose last token is then decoded too.

        Rows of the same numbers must give the same bits at every place. This finds products that are split by other
        bounds for some rows, elementwise operations with an edge within a block, and experts that mix up rows.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._model.vocab_size, (2 * ROWS,), generator=generator)
        sequence, others = ids[:_PROOF_LEN], ids[_PROOF_LEN:]
        before = ROWS - _PROOF_LEN // 2  # rows of another sequence, so that a block ends within this one
        size = self._block_size
        cache = KVCache(
            self._model.shapes,
            num_blocks=ROWS * -(-_PROOF_LEN // size) + -(-before // size),
            block_size=size,
            dtype=next(self._model.module.parameters()).dtype,
            device=self._device,
        )
        decoded = []
        for position in range(_PROOF_LEN):
            spans = [(row, position, position + 1) for row in range(ROWS)]
            logits = self._run(cache, sequence[position].repeat(ROWS), spans, 1)
            if not _same(logits, logits[:1].expand_as(logits)):
                raise UnsupportedModelError(self._refusal("row's place in a block"))
            decoded.append(logits[:1])
        blocks = -(-before // size)
        spans = [(1, 0, before), (0, 0, _PROOF_LEN)]
        whole = self._run(cache, torch.cat((others[:before], sequence)), spans, blocks)
        last = self._run(cache, others[before - 1 : before], [(1, before - 1, before)], blocks)
        if not _same(whole[before - 1 :], torch.cat((last, *decoded))):
            raise UnsupportedModelError(self._refusal("row's neighbours"))

    def _run(self, cache: KVCache, ids: Tensor, spans: list[tuple[int, int, int]], blocks_per_seq: int) -> Tensor:
        """Logits of all rows of one step. A span: which run of `blocks_per_seq` blocks, first and last position + 1."""
        size, device = cache.block_size, self._device
        table = torch.arange(cache.num_blocks // blocks_per_seq * blocks_per_seq).view(-1, blocks_per_seq)
        table = table[[row for row, _, _ in spans]]
        positions = [torch.arange(start, stop) for _, start, stop in spans]
        slot_mapping = [row[where // size] * size + where % size for row, where in zip(table, positions, strict=True)]
        meta = AttnMeta(
            query_lens=[stop - start for _, start, stop in spans],
            kv_lens=[stop for _, _, stop in spans],
            block_table=table.to(device),
            slot_mapping=torch.cat(slot_mapping).to(device),
            block_size=size,
            deterministic=True,
        )
        logit_positions = torch.arange(len(ids), device=device)
        step = StepContext(meta, cache, self._backend)
        return self.forward(ids.to(device), torch.cat(positions).to(device), logit_positions, step)

    def _refusal(self, cause: str) -> str:
        where = f"on {self._device}"
        if self._device.type == "cpu":
            where += f" with {torch.get_num_threads()} threads (another OMP_NUM_THREADS may do)"
        return f"{self._model.name} {where} gives logits that depend on a {cause}; it cannot run with --deterministic"


def _same(actual: Tensor, expected: Tensor) -> bool:
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    start: int  # rows start:stop of the step
    stop: int
    meta: AttnMeta  # of `ROWS` rows

    def padded(self, rows: Tensor) -> Tensor:
        """Its part of an int64 [num_tokens] tensor, and zeros up to `ROWS`."""
        own = rows[self.start : self.stop]
        return torch.cat((own, own.new_zeros(ROWS - len(own))))


def _blocks(meta: AttnMeta, null_block: int) -> Iterator[_Block]:
    """Cuts a step. What pads the last block is one more sequence, all of it in the null block."""
    table, all_kv_lens = meta.block_table, meta.kv_lens
    if meta.device_lens is not None:
        table = table[meta.device_lens.table_rows.long()]
        all_kv_lens = meta.device_lens.kv_lens.tolist()
    size = meta.block_size
    missing_columns = max(0, -(-ROWS // size) - table.shape[1])
    table = nn.functional.pad(table, (0, missing_columns, 0, 1), value=null_block)
    table[-1] = null_block
    seq = done = 0  # the next sequence, and how many of its new tokens are in blocks already
    num_tokens = sum(meta.query_lens)
    for start in range(0, num_tokens, ROWS):
        room = ROWS
        rows: list[int] = []
        query_lens: list[int] = []
        kv_lens: list[int] = []
        while room and seq < len(meta.query_lens):
            taken = min(room, meta.query_lens[seq] - done)
            done += taken
            rows.append(seq)
            query_lens.append(taken)
            kv_lens.append(all_kv_lens[seq] - meta.query_lens[seq] + done)
            room -= taken
            if done == meta.query_lens[seq]:
                seq, done = seq + 1, 0
        stop = min(num_tokens, start + ROWS)
        slot_mapping = meta.slot_mapping[start:stop]
        if room:
            rows.append(len(meta.query_lens))
            query_lens.append(room)
            kv_lens.append(room)
            slot_mapping = torch.cat(
                (slot_mapping, null_block * size + torch.arange(room, device=slot_mapping.device) % size)
            )
        own = AttnMeta(query_lens, kv_lens, table[rows], slot_mapping, size, deterministic=True)
        yield _Block(start, stop, own)
