"""`SlotTables`: the sampling settings of the rows of a batch, by slot, in tables on the device.

The host writes down the settings of a sequence when it gets its slot, and sends everything new at once before a step.
"""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchjob.core.sequence import Sequence
from batchjob.sampling import SamplingParams
from batchjob_kernels.sampling import settings_table as layout

_INT32_MAX = 2**31 - 1


class Need(IntFlag):
    """The parts of the sampler that a row needs, and the union of these for a step. More gives the same tokens."""

    GREEDY = 1  # no temperature
    RANDOM = 2
    TOP_K = 4  # this one and the next two for random rows only
    TOP_P = 8
    MIN_P = 16
    PENALTIES = 32
    BIAS = 64
    MIN_TOKENS = 128
    FILTERED = TOP_K | TOP_P | MIN_P
    EDITED = PENALTIES | BIAS | MIN_TOKENS


class _Staged(NamedTuple):
    """One slot's settings, yet to be sent."""

    words: np.ndarray  # int32 [layout.WIDTH]
    stops: tuple[int, ...]
    bias: tuple[tuple[int, float], ...]
    tokens: np.ndarray | None  # int32, of a row with penalties
    num_prompt_tokens: int


class SlotTables:
    """Tables with one row per slot. One more row, `max_num_seqs`, is for what fills up a step: greedy, without end."""

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], max_num_seqs: int, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._device = device
        num_rows = max_num_seqs + 1
        neutral = np.zeros(layout.WIDTH, dtype=np.int32)
        neutral[layout.MAX_OUTPUT] = _INT32_MAX
        neutral.view(np.float64)[layout.TOP_P // 2] = 1.0
        neutral.view(np.float32)[layout.REPETITION] = 1.0
        self.settings = torch.from_numpy(np.tile(neutral, (num_rows, 1))).to(device)  # [num_rows, layout.WIDTH]
        self.stops = torch.full((num_rows, 4), layout.NO_STOP, dtype=torch.int32, device=device)
        self.bias = torch.zeros(num_rows, 2, 0, dtype=torch.int32, device=device)  # token ids, amounts (float32)
        self.counts: Tensor | None = None  # [num_rows, vocab], see `layout`; made for the first row with penalties
        self.needs = np.full(num_rows, Need.GREEDY, dtype=np.uint8)  # on the host
        self._staged: dict[int, _Staged] = {}

    # -- on the host

    def admit(self, seq: Sequence) -> None:
        """Stages the settings of a sequence that has just got `seq.slot`, and its tokens if they are penalised."""
        params, slot = seq.request.params, seq.slot
        words = np.zeros(layout.WIDTH, dtype=np.int32)
        unsigned, floats = words.view(np.uint32), words.view(np.float32)
        unsigned[layout.KEY_LOW], unsigned[layout.KEY_HIGH] = seq.request.stream & 0xFFFFFFFF, seq.request.stream >> 32
        words.view(np.float64)[layout.TOP_P // 2] = params.top_p
        words[layout.TOP_K] = params.top_k if params.top_k < self._vocab_size else 0
        words[layout.MIN_TOKENS] = min(params.min_tokens, _INT32_MAX)
        words[layout.MAX_OUTPUT] = min(seq.max_len - seq.num_prompt_tokens, _INT32_MAX)
        with np.errstate(over="ignore"):  # beyond float32 is infinite
            # The lower bound keeps 0 / T from becoming NaN where T is no normal float32 number.
            floats[layout.TEMPERATURE] = max(params.temperature, 1e-30) if params.temperature else 0.0
            floats[layout.MIN_P] = params.min_p
            floats[layout.REPETITION] = params.repetition_penalty
            floats[layout.PRESENCE] = params.presence_penalty
            floats[layout.FREQUENCY] = params.frequency_penalty
        stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + self._eos
        bias: dict[int, float] = {}
        for token, amount in params.logit_bias:
            bias[token] = bias.get(token, 0.0) + amount
        self._staged[slot] = _Staged(
            words,
            tuple(dict.fromkeys(token for token in stops if token < self._vocab_size)),
            tuple(bias.items()),
            np.array(seq.tokens, dtype=np.int32) if params.has_penalties else None,
            seq.num_prompt_tokens,
        )
        self.needs[slot] = _needs(params, has_top_k=bool(words[layout.TOP_K]))

    def needs_of(self, slots: list[int]) -> Need:
        """The needs of these slots together."""
        return Need(int(np.bitwise_or.reduce(self.needs[slots], initial=0)))

    # -- to the device

    def upload(self) -> None:
        """Sends what was staged, in one transfer that the host does not wait for, and makes tables that it needs."""
        if not self._staged:
            return
        slots, rows = list(self._staged), list(self._staged.values())
        self._staged = {}
        width = self.stops.shape[1]
        self.stops = _widened(self.stops, max(len(row.stops) for row in rows))
        self.stops[:, width:] = self.stops[:, :1]
        self.bias = _widened(self.bias, max(len(row.bias) for row in rows))
        penalised = [(slot, row) for slot, row in zip(slots, rows, strict=True) if row.tokens is not None]
        histories = [row.tokens for _, row in penalised if row.tokens is not None]
        prompts = [tokens[: row.num_prompt_tokens] for tokens, (_, row) in zip(histories, penalised, strict=True)]
        outputs = [tokens[row.num_prompt_tokens :] for tokens, (_, row) in zip(histories, penalised, strict=True)]
        owners = np.array([slot for slot, _ in penalised], dtype=np.int32)
        parts = [
            np.array(slots, dtype=np.int32),
            np.stack([row.words for row in rows]),
            np.stack([_stop_words(row, self.stops.shape[1]) for row in rows]),
            np.stack([_bias_words(row, self.bias.shape[2]) for row in rows]),
            owners,
            np.repeat(owners, np.array([len(tokens) for tokens in prompts], dtype=np.int64)),
            np.concatenate([np.zeros(0, np.int32), *prompts]),
            np.repeat(owners, np.array([len(tokens) for tokens in outputs], dtype=np.int64)),
            np.concatenate([np.zeros(0, np.int32), *outputs]),
        ]
        index, words, stops, bias, owner, *history = self._send(parts)
        index = index.long()
        self.settings.index_copy_(0, index, words)
        self.stops.index_copy_(0, index, stops)
        if self.bias.shape[2]:
            self.bias.index_copy_(0, index, bias)
        if penalised:
            self._write_counts(owner, *history)

    def _send(self, parts: list[np.ndarray]) -> list[Tensor]:
        sizes = [part.size for part in parts]
        packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        np.concatenate([part.reshape(-1) for part in parts], out=packed.numpy())
        # The allocator of pinned memory keeps this block until the copy is over.
        sent = packed.to(self._device, non_blocking=True).split(sizes)
        return [tensor.view(part.shape) for tensor, part in zip(sent, parts, strict=True)]

    def _write_counts(
        self, owner: Tensor, prompt_slot: Tensor, prompt: Tensor, output_slot: Tensor, output: Tensor
    ) -> None:
        if self.counts is None:
            num_rows = len(self.settings)
            self.counts = torch.zeros(num_rows, self._vocab_size, dtype=torch.int32, device=self._device)
        self.counts.index_fill_(0, owner.long(), 0)
        flat, width = self.counts.view(-1), self._vocab_size
        flat.scatter_(0, prompt_slot.long() * width + prompt, layout.SEEN)
        flat.scatter_add_(0, output_slot.long() * width + output, torch.full_like(output, layout.ONE_OUTPUT))

    def count(self, tokens: Tensor, slots: Tensor) -> None:
        """Adds the tokens int64 [n] just drawn to the counts of their slots. -1 is none."""
        assert self.counts is not None
        where = slots.long() * self._vocab_size + tokens.clamp(min=0)
        self.counts.view(-1).scatter_add_(0, where, (tokens >= 0).int() * layout.ONE_OUTPUT)


def _needs(params: SamplingParams, *, has_top_k: bool) -> Need:
    needs = Need.RANDOM if params.temperature else Need.GREEDY
    if params.has_penalties:
        needs |= Need.PENALTIES
    if params.logit_bias:
        needs |= Need.BIAS
    if params.min_tokens > 0:
        needs |= Need.MIN_TOKENS
    if needs & Need.RANDOM:
        if has_top_k:
            needs |= Need.TOP_K
        if params.top_p < 1.0:
            needs |= Need.TOP_P
        if params.min_p > 0.0:
            needs |= Need.MIN_P
    return needs


def _widened(table: Tensor, width: int) -> Tensor:
    """The table with room for `width` entries in its last dimension: a power of two, at least 4. New ones are 0."""
    if width <= table.shape[-1]:
        return table
    wider = table.new_zeros((*table.shape[:-1], max(4, 1 << (width - 1).bit_length())))
    wider[..., : table.shape[-1]] = table
    return wider


def _stop_words(row: _Staged, width: int) -> np.ndarray:
    """Filled up with the first stop token, so that every entry of a row that has one may be written to."""
    words = np.full(width, row.stops[0] if row.stops else layout.NO_STOP, dtype=np.int32)
    words[: len(row.stops)] = row.stops
    return words


def _bias_words(row: _Staged, width: int) -> np.ndarray:
    """Filled up with additions of 0 to token 0."""
    words = np.zeros((2, width), dtype=np.int32)
    if row.bias:
        tokens, amounts = zip(*row.bias, strict=True)
        words[0, : len(tokens)] = tokens
        with np.errstate(over="ignore"):
            words.view(np.float32)[1, : len(tokens)] = amounts
    return words
