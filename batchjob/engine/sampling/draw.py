"""The draw: from the logits of a row to a token, with random numbers that depend on the row alone. In plain PyTorch.

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

from batchjob.engine.sampling.filters import filter_weights
from batchjob.engine.sampling.philox import exponential, philox4x32
from batchjob.engine.sampling.slot_params import Need
from batchjob_kernels.sampling import settings_table as layout
from batchjob_kernels.sampling.settings_table import GROUP, GROUP_LEVEL, TOKEN_LEVEL  # GROUP: about the root of a vocab


def padded(logits: Tensor) -> Tensor:
    """A float32 copy of `logits` [n, vocab], filled up to whole groups with what is never drawn."""
    num_rows, vocab_size = logits.shape
    work = torch.empty(num_rows, -(-vocab_size // GROUP) * GROUP, dtype=torch.float32, device=logits.device)
    work[:, :vocab_size] = logits
    work[:, vocab_size:] = -torch.inf
    return work


class Race:
    """The draw for some rows with a temperature. `run` takes them in their order, in parts of any size.

    The random numbers of all rows are made at once: on a CPU they cost as much for ten rows as for one.
    """

    def __init__(self, settings: Tensor, num_output_tokens: Tensor, vocab_size: int) -> None:
        """`settings` int32 [n, layout.WIDTH] and `num_output_tokens` [n] of the rows."""
        words = settings.long() & 0xFFFFFFFF
        self._settings = settings
        self._key, self._position = (words[:, layout.KEY_LOW], words[:, layout.KEY_HIGH]), num_output_tokens.long()
        self._noise = group_noise(self._key, self._position, -(-vocab_size // GROUP))
        self._num_run = 0
        self._best: list[Tensor] = []
        self._groups: list[Tensor] = []
        self._weights: list[Tensor] = []

    def run(self, work: Tensor, needs: Need, *, may_wait: bool) -> None:
        """Draws the groups of the next rows, whose logits are in `work` [rows, groups * GROUP] as `padded` returns
        them; their weights replace them there. `may_wait`: see `filter_weights`."""
        rows = slice(self._num_run, self._num_run + len(work))
        self._num_run = rows.stop
        settings = self._settings[rows]
        temperature = settings.view(torch.float32)[:, layout.TEMPERATURE, None]
        best = work.amax(dim=1)
        work.sub_(best[:, None]).div_(torch.where(temperature > 0, temperature, 1)).exp_()
        weights = work.view(len(work), work.shape[1] // GROUP, GROUP)
        if needs & Need.FILTERED:
            filter_weights(weights, settings, needs, may_wait=may_wait)
        group = torch.argmax(weights.sum(dim=2).double() / self._noise[rows], dim=1)
        self._best.append(best)
        self._groups.append(group)
        self._weights.append(weights.gather(1, group[:, None, None].expand(-1, 1, GROUP)).squeeze(1))

    def tokens(self) -> Tensor:
        """Draws the tokens within the groups; int64 [n], -1 where the best logit is not finite."""
        group, weights = torch.cat(self._groups), torch.cat(self._weights)
        noise = token_noise(self._key, self._position, group)
        token = group * GROUP + torch.argmax(weights.double() / noise, dim=1)
        return torch.where(torch.isfinite(torch.cat(self._best)), token, -1)


def is_random(settings: Tensor) -> Tensor:
    """Returns which rows have a temperature, bool [n]."""
    return settings.view(torch.float32)[:, layout.TEMPERATURE] > 0


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


def ended(tokens: Tensor, settings: Tensor, stops: Tensor, num_output_tokens: Tensor) -> Tensor:
    """Returns which tokens [n], each after `num_output_tokens` others, end their rows; bool [n]."""
    num_output = num_output_tokens + 1
    stopped = (tokens[:, None] == stops).any(dim=1) & (num_output >= settings[:, layout.MIN_TOKENS])
    return stopped | (num_output >= settings[:, layout.MAX_OUTPUT]) | (tokens < 0)
