"""What a row's settings change about its logits before they are scaled: penalties, bias, end tokens held back.

All edits are sparse (a row's own tokens, a few ids), so that they cost the same for a vocabulary of any size.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from batchjob.core.sequence import Sequence


class History:
    """The distinct tokens of one sequence and how often each is in its output, kept up from step to step."""

    __slots__ = ("_counts", "_ids", "_index", "_num_seen", "seq")

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self._index: dict[int, int] = {}  # token id -> position in the two arrays
        self._ids = array("q")
        self._counts = array("q")  # in the output; 0 for a token that only the prompt has
        self._num_seen = 0

    def update(self) -> tuple[array[int], array[int]]:
        """Distinct token ids and their counts in the output, after reading what is new in the sequence."""
        seq = self.seq
        for position in range(self._num_seen, len(seq.tokens)):
            token = seq.tokens[position]
            index = self._index.setdefault(token, len(self._ids))
            if index == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[index] += position >= seq.num_prompt_tokens
        self._num_seen = len(seq.tokens)
        return self._ids, self._counts


class LogitEditor:
    """Edits logits in place, in the documented order: penalties, logit_bias, end tokens before min_tokens.

    Repetition follows Keskar et al. (CTRL, 2019) as Transformers has it; presence and frequency follow OpenAI's API.
    """

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._histories: dict[int, History] = {}  # by slot, so that there are never more than max_num_seqs

    def applies(self, seq: Sequence) -> bool:
        """Whether the next token of this sequence needs an edit."""
        params = seq.request.params
        return (
            params.has_penalties
            or bool(params.logit_bias)
            or len(seq.tokens) - seq.num_prompt_tokens < params.min_tokens
        )

    def edit(self, logits: Tensor, seqs: list[Sequence]) -> None:
        """Changes `logits` [len(seqs), vocab] float32 in place."""
        self._penalise(logits, seqs)
        biases = [(row, token, bias) for row, seq in enumerate(seqs) for token, bias in seq.request.params.logit_bias]
        if biases:
            rows, tokens, amounts = zip(*biases, strict=True)
            where = self._index(logits, rows, tokens)
            logits.index_put_(where, torch.tensor(amounts, dtype=logits.dtype, device=logits.device), accumulate=True)
        held = [(row, token) for row, seq in enumerate(seqs) for token in self._held_back(seq)]
        if held:
            rows, tokens = zip(*held, strict=True)
            logits[self._index(logits, rows, tokens)] = -torch.inf

    def _held_back(self, seq: Sequence) -> tuple[int, ...]:
        params = seq.request.params
        if seq.num_output_tokens >= params.min_tokens:
            return ()
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids + self._eos_token_ids

    def _penalise(self, logits: Tensor, seqs: list[Sequence]) -> None:
        penalised = [(row, seq) for row, seq in enumerate(seqs) if seq.request.params.has_penalties]
        if not penalised:
            return
        ids, counts, lengths, factors = [], [], [], []
        for _, seq in penalised:
            row_ids, row_counts = self._history(seq).update()
            ids.append(torch.frombuffer(row_ids, dtype=torch.int64))
            counts.append(torch.frombuffer(row_counts, dtype=torch.int64))
            lengths.append(len(row_ids))
            params = seq.request.params
            factors.append((params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
        # torch.cat copies, so the arrays are free to grow again once the views are gone.
        token, count = torch.cat(ids).to(logits.device), torch.cat(counts).to(logits.device)
        del ids, counts
        repeats = torch.tensor(lengths)
        row = torch.tensor([row for row, _ in penalised]).repeat_interleave(repeats).to(logits.device)
        factor = torch.tensor(factors, dtype=logits.dtype).repeat_interleave(repeats, dim=0).to(logits.device)
        repetition, presence, frequency = factor.unbind(1)
        value = logits[row, token]
        value = torch.where(value < 0, value * repetition, value / repetition)
        value -= presence * (count > 0) + frequency * count
        logits[row, token] = value

    def _history(self, seq: Sequence) -> History:
        history = self._histories.get(seq.slot)
        if history is None or history.seq is not seq:
            history = self._histories[seq.slot] = History(seq)
        return history

    @staticmethod
    def _index(logits: Tensor, rows: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
