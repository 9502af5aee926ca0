"""Edits of the logits and the draw for a batch whose settings lie on the device: the portable form, in plain PyTorch.

The same operations as in `logits`, `filters` and `sampler`, in the same order, without a step that needs the host:
no shape depends on what is in a tensor. Settings are rows of the table that `SlotTables` keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchjob.engine.sampling.filters import filter_batched
from batchjob.engine.sampling.sampler import first_largest, group_noise, token_noise
from batchjob_kernels.sampling import settings_table as layout


def penalise(logits: Tensor, settings: Tensor, counts: Tensor) -> Tensor:
    """Logits [n, vocab] after the penalties, a float32 copy. `counts` int32 [n, vocab] are those of the rows."""
    floats = settings.view(torch.float32)
    repetition, presence, frequency = (
        floats[:, column, None] for column in (layout.REPETITION, layout.PRESENCE, layout.FREQUENCY)
    )
    value = logits.float()
    in_output = counts >> 1
    edited = torch.where(value < 0, value * repetition, value / repetition)
    edited -= presence * (in_output > 0) + frequency * in_output
    return torch.where(counts > 0, edited, value)


def add_bias(logits: Tensor, bias: Tensor) -> None:
    """In place. `bias` int32 [n, 2, width]: token ids, and amounts as float32."""
    logits.scatter_add_(1, bias[:, 0].long(), bias[:, 1].view(torch.float32))


def hold_back(logits: Tensor, settings: Tensor, stops: Tensor, num_output_tokens: Tensor) -> None:
    """In place: no stop token int32 [n, width] before min_tokens output tokens."""
    held = (num_output_tokens < settings[:, layout.MIN_TOKENS])[:, None] & (stops >= 0)
    where = stops.clamp(min=0).long()  # a row without any writes back its token 0
    logits.scatter_(1, where, logits.gather(1, where).masked_fill_(held, -torch.inf))


def draw(logits: Tensor, settings: Tensor, num_output_tokens: Tensor, *, filtered: bool) -> Tensor:
    """Tokens int64 [n], rows with a temperature drawn and the others greedy; -1 where the best is not finite."""
    num_rows, vocab_size = logits.shape
    num_groups = -(-vocab_size // layout.GROUP)
    weights = torch.full(
        (num_rows, num_groups * layout.GROUP), -torch.inf, dtype=torch.float32, device=logits.device
    )  # beyond the vocabulary lies what is never drawn
    weights[:, :vocab_size] = logits
    floats = settings.view(torch.float32)
    temperature = floats[:, layout.TEMPERATURE, None]
    best = weights.amax(dim=1)
    weights.sub_(best[:, None]).div_(torch.where(temperature > 0, temperature, 1)).exp_()
    grouped = weights.view(num_rows, num_groups, layout.GROUP)
    if filtered:
        top_p = settings.view(torch.float64)[:, layout.TOP_P // 2]
        filter_batched(grouped, settings[:, layout.TOP_K], top_p, floats[:, layout.MIN_P])
    words = settings.long() & 0xFFFFFFFF
    key, position = (words[:, layout.KEY_LOW], words[:, layout.KEY_HIGH]), num_output_tokens.long()
    group = torch.argmax(grouped.sum(dim=2).double() / group_noise(key, position, num_groups), dim=1)
    chosen = grouped.gather(1, group[:, None, None].expand(-1, 1, layout.GROUP)).squeeze(1)
    token = group * layout.GROUP + torch.argmax(chosen.double() / token_noise(key, position, group), dim=1)
    token = torch.where(torch.isfinite(best), token, -1)
    return torch.where(temperature[:, 0] > 0, token, first_largest(logits))


def ended(tokens: Tensor, settings: Tensor, stops: Tensor, num_output_tokens: Tensor) -> Tensor:
    """Whether tokens [n], each after `num_output_tokens` others, end their rows; bool [n]."""
    num_output = num_output_tokens + 1
    stopped = (tokens[:, None] == stops).any(dim=1) & (num_output >= settings[:, layout.MIN_TOKENS])
    return stopped | (num_output >= settings[:, layout.MAX_OUTPUT]) | (tokens < 0)
