"""`Sampler`: logits to token ids, with settings per row and random numbers that depend on the row alone.

The draw is Gumbel-max in two levels. Over a vocabulary cut into groups of 256 token ids, first the group that holds
the largest logit + Gumbel noise is drawn (that maximum is itself Gumbel, around the log-sum-exp of the group, and
independent of where in the group it lies), then the token within it; Maddison, Tarlow and Minka, "A* sampling" (2014),
build the same tree. It is exact, needs no sort, and asks for vocab/256 + 256 random numbers where the one-level form
asks for one per token. (Leaving out tokens that cannot win saves little: the largest Gumbel draw is 23 above the
typical one, and most of a vocabulary lies within that distance of its best logit.) As exp(Gumbel) is 1/Exponential,
both levels are the argmax of weight / exponential draw.

The random numbers are Philox words with key = `request.stream` and counter = (token or group id, number of output
tokens so far, level). So a row's tokens depend on its logits, settings and stream only: not on batch, place, slot,
preemption or restart. Every operation works on each row by itself, in one order for any number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob.core.sequence import Sequence
from batchjob.engine.sampling.filters import filter_weights
from batchjob.engine.sampling.logits import LogitEditor
from batchjob.engine.sampling.philox import exponential, philox4x32
from batchjob_kernels.sampling.settings_table import (  # GROUP: about the root of a vocabulary
    GROUP,
    GROUP_LEVEL,
    TOKEN_LEVEL,
)

_CACHE_BYTES = 1 << 21  # rows worked on at once on a CPU: what stays in its cache is 5 times as fast


class Sampler:
    """Holds scratch memory, and the token counts of rows with penalties (by slot); otherwise a function."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        self._num_groups = -(-vocab_size // GROUP)
        self._editor = LogitEditor(tuple(token for token in eos_token_ids if token < vocab_size))
        self._scratch = torch.zeros(0, self._num_groups, GROUP, device=self._device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, seqs: list[Sequence]) -> Tensor:
        """The next token of each sequence.

        `logits` is [len(seqs), vocab_size] and is left unchanged; the draw is made in float32. Returns int64
        [len(seqs)] on the sampler's device, with -1 where a row's best logit is not a finite number.
        """
        greedy: list[int] = []
        edited: list[int] = []
        random: list[int] = []
        for row, seq in enumerate(seqs):
            if seq.request.params.temperature != 0.0:
                random.append(row)
            elif self._editor.applies(seq):
                edited.append(row)
            else:
                greedy.append(row)
        if len(greedy) == len(seqs):
            return first_largest(logits)
        tokens = torch.empty(len(seqs), dtype=torch.int64, device=self._device)
        if greedy:
            index = self._ints(greedy)
            tokens[index] = first_largest(logits[index])
        for rows in self._blocks(edited):
            work = self._load(logits, rows)
            self._editor.edit(work, [seqs[row] for row in rows])
            tokens[self._ints(rows)] = first_largest(work)
        if random:
            tokens[self._ints(random)] = self._draw(logits, random, seqs)
        return tokens

    def _draw(self, logits: Tensor, rows: list[int], all_seqs: list[Sequence]) -> Tensor:
        """Tokens int64 [len(rows)] of the rows with a temperature."""
        seqs = [all_seqs[row] for row in rows]
        streams = [seq.request.stream for seq in seqs]
        key = self._ints([stream & 0xFFFFFFFF for stream in streams]), self._ints([s >> 32 for s in streams])
        position = self._ints([seq.num_output_tokens for seq in seqs])
        noise = group_noise(key, position, self._num_groups)
        best: list[Tensor] = []
        groups: list[Tensor] = []
        weights: list[Tensor] = []
        done = 0
        for block in self._blocks(rows):
            stop = done + len(block)
            best.append(self._weigh(self._load(logits, block), seqs[done:stop]))
            work = self._scratch[: len(block)]
            groups.append(torch.argmax(work.sum(dim=2).double() / noise[done:stop], dim=1))
            weights.append(work[torch.arange(len(block), device=self._device), groups[-1]])
            done = stop
        group, weight = torch.cat(groups), torch.cat(weights)  # [len(rows)], [len(rows), GROUP]
        token = group * GROUP + torch.argmax(weight.double() / token_noise(key, position, group), dim=1)
        return torch.where(torch.isfinite(torch.cat(best)), token, -1)

    def _weigh(self, work: Tensor, seqs: list[Sequence]) -> Tensor:
        """Logits to weights in place, and the best logit [rows] after the edits.

        `work` is the view of the scratch memory that `_load` returns. A weight is a probability up to a factor per
        row: 1 for the most likely token, 0 for a filtered one.
        """
        if any(self._editor.applies(seq) for seq in seqs):
            self._editor.edit(work, seqs)
        params = [seq.request.params for seq in seqs]
        best = work.amax(dim=1)
        work.sub_(best[:, None])
        if any(p.temperature != 1.0 for p in params):
            # The lower bound keeps 0 / T from becoming NaN where T is no normal float32 number.
            work.div_(torch.tensor([[max(p.temperature, 1e-30)] for p in params], device=self._device))
        work.exp_()
        filter_weights(self._scratch[: len(seqs)], params)
        return best

    def _blocks(self, rows: list[int]) -> list[list[int]]:
        """The rows in blocks that are worked on at once. The scratch memory has room for the largest."""
        size = len(rows)
        if self._device.type == "cpu":
            size = min(size, max(1, _CACHE_BYTES // (4 * self._num_groups * GROUP)))
        if len(self._scratch) < size:
            self._scratch = torch.zeros(size, self._num_groups, GROUP, device=self._device)
        return [rows[start : start + size] for start in range(0, len(rows), size)] if rows else []

    def _load(self, logits: Tensor, rows: list[int]) -> Tensor:
        """A float32 copy [len(rows), vocab] of some rows, as a view of the scratch memory.

        That is wider: what lies beyond the vocabulary stays 0, a weight that is never drawn.
        """
        work = self._scratch.flatten(1)[: len(rows), : self._vocab_size]
        first, last = rows[0], rows[-1]
        work.copy_(logits[first : last + 1] if last - first + 1 == len(rows) else logits[self._ints(rows)])
        return work

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def group_noise(key: tuple[Tensor, Tensor], position: Tensor, num_groups: int) -> Tensor:
    """Exponential draws float64 [rows, num_groups] for the race between the groups."""
    return _noise(key, position, torch.zeros_like(position), -(-num_groups // 4), GROUP_LEVEL)[:, :num_groups]


def token_noise(key: tuple[Tensor, Tensor], position: Tensor, group: Tensor) -> Tensor:
    """Exponential draws float64 [rows, GROUP] for the race between the tokens of one group per row."""
    return _noise(key, position, group * (GROUP // 4), GROUP // 4, TOKEN_LEVEL)


def _noise(key: tuple[Tensor, Tensor], position: Tensor, first: Tensor, width: int, level: int) -> Tensor:
    """Exponential draws float64 [rows, 4 * width] of `width` consecutive counters from `first` [rows]."""
    counter = first[:, None] + torch.arange(width, device=first.device)
    levels = torch.full_like(first, level)[:, None]
    words = philox4x32(
        (counter, position[:, None], levels, torch.zeros_like(levels)), (key[0][:, None], key[1][:, None])
    )
    return exponential(words.flatten(1))


def first_largest(logits: Tensor) -> Tensor:
    """The first of the largest logits of each row; -1 where that is not a finite number (NaN wins an argmax).

    By the best of each group first: on a CPU a maximum is 10 times as fast as an argmax.
    """
    if logits.shape[1] % GROUP or not logits.is_contiguous():
        token = torch.argmax(logits, dim=1)
    else:
        grouped = logits.view(len(logits), logits.shape[1] // GROUP, GROUP)
        group = torch.argmax(grouped.amax(dim=2), dim=1)
        inside = grouped[torch.arange(len(logits), device=logits.device), group]
        token = group * GROUP + torch.argmax(inside, dim=1)
    value = logits.gather(1, token[:, None]).squeeze(1)
    return torch.where(torch.isfinite(value), token, -1)
