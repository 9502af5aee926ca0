"""`Generate`: text after a prompt. The first task, and the default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from batchjob.core.sequence import Sequence
from batchjob.records import Completion, Request, RowError
from batchjob.tasks.base import NOT_FINITE, Detokenizer, TaskConfig
from batchjob.tasks.stop_strings import StopStrings


class Generate:
    """A row ends, whichever comes first: at an end token of the model (unless `ignore_eos`) or one of
    `stop_token_ids`; at a stop string; at `Sequence.max_len`, which is the smaller of `max_tokens` and
    `max_model_len`. None of the first two counts before `min_tokens` tokens.

    The end token stays in `token_ids` and is no part of the text. The text is what the tokenizer makes of the output
    tokens alone, cut at the stop string.
    """

    name: ClassVar[str] = "generate"

    def __init__(self, detokenizer: Detokenizer, config: TaskConfig) -> None:
        self._detokenizer = detokenizer
        self._eos = frozenset(config.eos_token_ids)
        self._unknown_ids = frozenset(config.unknown_token_ids)
        self._may_end = {*config.eos_token_ids, NOT_FINITE}  # no other token ends a row by itself
        self._has_stop_strings = False  # so that a job without any never asks
        self._stop_strings: dict[Sequence, StopStrings] = {}  # of rows that have generated a token

    def add(self, request: Request, vocab_size: int) -> RowError | None:
        """Refuses token ids that the model does not have: they would fail a step, and other rows with it."""
        params = request.params
        if params.stop_token_ids and max(params.stop_token_ids) >= vocab_size:
            return RowError("invalid_params", f"stop_token_ids has an id outside the vocabulary of {vocab_size}")
        if params.logit_bias and max(params.logit_bias)[0] >= vocab_size:
            return RowError("invalid_params", f"logit_bias has an id outside the vocabulary of {vocab_size}")
        wanted = (token for token, bias in params.logit_bias if bias > 0 and token in self._unknown_ids)
        if (unknown := next(wanted, None)) is not None:
            return RowError("invalid_params", f"logit_bias has the id {unknown}, which stands for no token")
        self._may_end.update(params.stop_token_ids)
        self._has_stop_strings = self._has_stop_strings or bool(params.stop)
        return None

    def ended(self, sampled: Iterable[tuple[Sequence, int]]) -> list[tuple[Sequence, Completion]]:
        """Most tokens end nothing, and cost one look into a set."""
        may_end, has_stop_strings = self._may_end, self._has_stop_strings
        return [
            (seq, completion)
            for seq, token in sampled
            if (token in may_end or len(seq.tokens) >= seq.max_len or (has_stop_strings and seq.request.params.stop))
            and (completion := self._completion(seq, token)) is not None
        ]

    def forget(self, seq: Sequence) -> None:
        self._stop_strings.pop(seq, None)

    def _completion(self, seq: Sequence, token: int) -> Completion | None:
        """The result of a sequence, if its newest token ends it."""
        request, params = seq.request, seq.request.params
        if token == NOT_FINITE:
            self.forget(seq)
            error = RowError("engine_error", "the model's logits are not finite numbers")
            return Completion.failed(request, error, token_ids=seq.output_token_ids[:-1])
        is_armed = seq.num_output_tokens >= params.min_tokens
        is_end = is_armed and (token in params.stop_token_ids or (token in self._eos and not params.ignore_eos))
        is_match = False
        strings = self._strings_of(seq) if params.stop else None
        if strings is not None and not is_end:
            is_match = strings.push(token, armed=is_armed)
        if not is_end and not is_match and len(seq.tokens) < seq.max_len:
            return None
        if strings is not None and not is_match:
            is_match = strings.flush(armed=is_armed)
        self.forget(seq)
        output = seq.output_token_ids
        ids = output[:-1] if is_end else output
        return Completion(
            row_index=request.row_index,
            sample_index=request.sample_index,
            num_prompt_tokens=seq.num_prompt_tokens,
            token_ids=output,
            text=strings.text(ids) if strings is not None and is_match else self._detokenizer.decode(ids),
            finish_reason="stop" if is_end or is_match else "length",
        )

    def _strings_of(self, seq: Sequence) -> StopStrings:
        strings = self._stop_strings.get(seq)
        if strings is None:
            params = seq.request.params
            strings = self._stop_strings[seq] = StopStrings(self._detokenizer, params)
            for count, token in enumerate(seq.request.output_token_ids, 1):  # of an earlier attempt; none ended the row
                strings.push(token, armed=count >= params.min_tokens)
        return strings
