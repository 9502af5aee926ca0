"""Edits of the logits before they are scaled: penalties, logit_bias, end tokens held back; in this order and in place.

Settings are rows of the table that `SlotTables` keeps. No shape depends on what is in a tensor, and nothing waits for
the device, but for `penalise_seen`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchjob_kernels.sampling import settings_table as layout


def penalise(logits: Tensor, settings: Tensor, counts: Tensor) -> None:
    """Applies the penalties to float32 `logits` [n, vocab], given the rows' `counts` int32 [n, vocab].

    Repetition follows Keskar et al. (CTRL, 2019) as Transformers has it; presence and frequency follow OpenAI's API.
    """
    factors = (column[:, None] for column in _penalties(settings))
    logits.copy_(torch.where(counts > 0, _penalised(logits, counts, *factors), logits))


def penalise_seen(logits: Tensor, settings: Tensor, counts: Tensor, slots: Tensor) -> None:
    """The same on a CPU, where it pays to look for the few tokens that a row has; `counts` int32 [slots, vocab]."""
    table = counts.numpy()
    seen = [np.flatnonzero(table[slot] > 0) for slot in slots.tolist()]
    row = torch.arange(len(seen)).repeat_interleave(torch.tensor([len(tokens) for tokens in seen]))
    token = torch.from_numpy(np.concatenate(seen))
    factors = (column[row] for column in _penalties(settings))
    logits[row, token] = _penalised(logits[row, token], counts[slots.long()[row], token], *factors)


def _penalties(settings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    floats = settings.view(torch.float32)
    return floats[:, layout.REPETITION], floats[:, layout.PRESENCE], floats[:, layout.FREQUENCY]


def _penalised(value: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    in_output = counts >> 1
    value = torch.where(value < 0, value * repetition, value / repetition)
    return value.sub_(presence * (in_output > 0) + frequency * in_output)


def add_bias(logits: Tensor, bias: Tensor) -> None:
    """`bias` int32 [n, 2, width]: token ids, and amounts as float32."""
    logits.scatter_add_(1, bias[:, 0].long(), bias[:, 1].view(torch.float32))


def hold_back(logits: Tensor, settings: Tensor, stops: Tensor, num_output_tokens: Tensor) -> None:
    """No stop token int32 [n, width] comes before min_tokens output tokens."""
    held = (num_output_tokens < settings[:, layout.MIN_TOKENS])[:, None] & (stops >= 0)
    where = stops.clamp(min=0).long()  # a row without any writes back its token 0
    logits.scatter_(1, where, logits.gather(1, where).masked_fill_(held, -torch.inf))
