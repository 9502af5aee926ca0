"""`Sampler`: logits to token ids, with settings by slot and random numbers that depend on the row alone.

Settings, token counts and tokens stay on the device, so that the next step can be started before the host knows the
tokens of the last one, and several steps at once. The work is done by plain PyTorch or, with `use_triton`, by the
kernels of `batchjob_kernels.sampling.triton`: equal settings and random numbers, in the same order. On a GPU nothing in
`sample` or `ended` waits for the device or has a shape that depends on what is in a tensor.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from batchjob.core.sequence import Sequence
from batchjob.engine.sampling import draw, edits
from batchjob.engine.sampling.slot_params import Need, SlotTables

_CACHE_BYTES = 1 << 21  # rows worked on at once on a CPU: what stays in its cache is 5 times as fast


Rows = slice | Tensor


def penalty_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """The size of the token counts that the first row with penalties brings: memory that the KV cache must leave."""
    return 4 * vocab_size * (max_num_seqs + 1)


class Sampler:
    """Slot `max_num_seqs` is for the rows that fill up a step."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        max_num_seqs: int,
        device: torch.device,
        use_triton: bool,
    ) -> None:
        self._vocab_size = vocab_size
        self._tables = SlotTables(vocab_size, eos_token_ids, max_num_seqs, device)
        self._ops: ModuleType | None = None
        if use_triton:  # where Triton is missing, nothing else here needs it
            self._ops = import_module("batchjob_kernels.sampling.triton")
        self._may_wait = device.type == "cpu" and not use_triton
        self._slots: list[int] = []
        self.needs = Need(0)

    @torch.inference_mode()
    def prepare(self, new_seqs: list[Sequence], slots: list[int]) -> None:
        """Comes before the draws of a step over `slots`. `new_seqs` got their slots since the step before; their
        settings, and the tokens of those with penalties, are sent without waiting."""
        for seq in new_seqs:
            self._tables.admit(seq)
        self._tables.upload()
        if new_seqs or slots != self._slots:
            self._slots = slots
            self.needs = self._tables.needs_of(slots)

    def draw(
        self, logits: Tensor, slots: Tensor, num_output_tokens: Tensor, *, needs_ended: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens that `sample` returns, and with `needs_ended` also the rows that they end."""
        tokens = self.sample(logits, slots, num_output_tokens)
        return tokens, self.ended(tokens, slots, num_output_tokens) if needs_ended else None

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Tensor, num_output_tokens: Tensor) -> Tensor:
        """The next token of each row; int64 [n], with -1 where a row's best logit is not a finite number.

        `logits` [n, vocab_size] is left unchanged; the draw is made in float32. `slots` are among those prepared for,
        or that of rows that fill up; they and `num_output_tokens`, the number before this draw, are integers [n] on
        the device. A row with penalties has its token counted: if it goes on after a draw that was discarded, it must
        be new in `prepare` again.
        """
        sample = self._sample if self._ops is None else partial(self._sample_by_kernels, self._ops)
        tokens = sample(logits, slots, num_output_tokens)
        if self.needs & Need.PENALTIES:
            self._tables.count(tokens, slots)
        return tokens

    def _sample(self, logits: Tensor, slots: Tensor, num_output_tokens: Tensor) -> Tensor:
        """The form in plain PyTorch."""
        settings = self._tables.settings[slots]
        parts, drawn = self._parts(slots) if self._may_wait else ([(slice(None), self.needs)], slice(None))
        race = None
        if drawn is not None and self.needs & Need.RANDOM:
            race = draw.Race(settings[drawn], num_output_tokens[drawn], self._vocab_size)
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        for rows, needs in parts:
            if needs == Need.GREEDY:
                tokens[rows] = draw.first_largest(logits[rows])
                continue
            work = draw.padded(logits[rows])
            edited = work[:, : self._vocab_size]
            if needs & Need.PENALTIES:
                self._penalise(edited, settings[rows], slots[rows])
            self._edit(edited, settings[rows], slots[rows], num_output_tokens[rows], needs)
            if needs & Need.GREEDY:
                tokens[rows] = draw.first_largest(edited)
            if race is not None and needs & Need.RANDOM:
                race.run(work, needs, may_wait=self._may_wait)
        if race is not None:
            tokens[drawn] = torch.where(draw.is_random(settings[drawn]), race.tokens(), tokens[drawn])
        return tokens

    def _parts(self, slots: Tensor) -> tuple[list[tuple[Rows, Need]], Rows | None]:
        """On a CPU, rows of equal needs go together, as many at once as its cache holds. Returns these parts, and all
        rows with a temperature, in the order of their parts."""
        by_row = self._tables.needs[slots.numpy()]
        at_once = max(1, _CACHE_BYTES // (4 * self._vocab_size))
        parts: list[tuple[Rows, Need]] = []
        drawn: list[np.ndarray] = []
        for kind in np.unique(by_row).tolist():
            rows, needs = np.flatnonzero(by_row == kind), Need(kind)
            size = len(rows) if needs == Need.GREEDY else at_once
            parts += [(_index(rows[start : start + size]), needs) for start in range(0, len(rows), size)]
            if needs & Need.RANDOM:
                drawn.append(rows)
        return parts, _index(np.concatenate(drawn)) if drawn else None

    def _penalise(self, logits: Tensor, settings: Tensor, slots: Tensor) -> None:
        counts = self._tables.counts
        assert counts is not None
        if self._may_wait:
            edits.penalise_seen(logits, settings, counts, slots)
        else:
            edits.penalise(logits, settings, counts[slots])

    def _sample_by_kernels(self, ops: ModuleType, logits: Tensor, slots: Tensor, num_output_tokens: Tensor) -> Tensor:
        settings, needs = self._tables.settings, self.needs
        if needs & Need.EDITED:
            if needs & Need.PENALTIES:
                logits = ops.penalise(logits, settings, self._tables.counts, slots)
            else:
                logits = logits.to(torch.float32, copy=True)
            self._edit(logits, settings[slots], slots, num_output_tokens, needs)
        is_random, is_filtered = bool(needs & Need.RANDOM), bool(needs & Need.FILTERED)
        tokens: Tensor = ops.sample(logits, settings, slots, num_output_tokens, random=is_random, filtered=is_filtered)
        return tokens

    def _edit(self, logits: Tensor, settings: Tensor, slots: Tensor, num_output_tokens: Tensor, needs: Need) -> None:
        """The edits that follow the penalties, in place."""
        if needs & Need.BIAS:
            edits.add_bias(logits, self._tables.bias[slots])
        if needs & Need.MIN_TOKENS:
            edits.hold_back(logits, settings, self._tables.stops[slots], num_output_tokens)

    @torch.inference_mode()
    def ended(self, tokens: Tensor, slots: Tensor, num_output_tokens: Tensor) -> Tensor:
        """Returns which of the tokens [n] that `sample` has just drawn end their rows; bool [n].

        A row ends by an end token (unless `ignore_eos`) or stop token once `min_tokens` are out, by length, or by -1.
        `num_output_tokens` is the argument that `sample` got. Stop strings are the host's concern.
        """
        tables = self._tables
        if self._ops is not None:
            return self._ops.ended(tokens, tables.settings, tables.stops, slots, num_output_tokens)
        return draw.ended(tokens, tables.settings[slots], tables.stops[slots], num_output_tokens)


def _index(rows: np.ndarray) -> Rows:
    """A slice, and with it no copy, where the rows are neighbours in order."""
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return torch.from_numpy(rows)
