"""The forms of a row on its way: in a file, ready to run, running, finished.

A row is a `Record` in a file, a `Prompt` once it is rendered and tokenised, one `Request` per sample when the
engine gets it (a `core.Sequence` while it runs), and a `Completion` when it is over. Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchjob.spec import SamplingParams

# Every value of the output column `error_type`. The list is closed: a new failure gets a new line here.
ROW_ERROR_TYPES: Mapping[str, str] = {
    "invalid_json": "the line is not one JSON object",
    "invalid_encoding": "the line is not UTF-8, or holds half of a surrogate pair",
    "row_too_large": "the line is longer than --max-row-bytes",
    "input_damaged": "the compressed file is damaged here; the rows after this place are missing",
    "invalid_prompt": "the prompt is missing, null, empty or of the wrong type",
    "invalid_params": "the row's params hold an unknown name or a value out of range",
    "template_error": "the chat template refused the row, took too long or wrote too much",
    "tokenizer_crash": "the row brought the tokeniser down, or hung it, each time it was tokenised alone",
    "prompt_too_long": "the prompt leaves no room for output within max_model_len",
    "kv_cache_too_small": "the row needs more KV blocks than the whole cache has",
    "engine_error": "the engine failed on this row",
    "engine_crash": "the row brought the engine down each time it ran alone",
}


@dataclass(frozen=True, slots=True)
class RowError:
    """The failure of a row: `type` is a key of ROW_ERROR_TYPES, `message` says what is wrong and where."""

    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Record:
    """One input row. `row_index` is its ordinal over the whole plan; `fields` holds only the columns asked for.

    `where` names file and physical line (or Parquet row), for messages. A row that could not be read has `error`.
    """

    row_index: int
    fields: Mapping[str, Any]
    where: str
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row ready to run, or its error. `params` is None where the job's own settings hold unchanged."""

    row_index: int
    token_ids: list[int]
    params: SamplingParams | None = None
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sample of one row. `stream` keys its random numbers (see `stream_key`).

    `output_token_ids` were generated in an earlier attempt that was stopped; generation continues after them.
    """

    row_index: int
    sample_index: int
    token_ids: list[int]
    params: SamplingParams
    stream: int
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample: text and reason, or an error. `token_ids` are the output tokens, end token included."""

    row_index: int
    sample_index: int
    num_prompt_tokens: int
    token_ids: list[int]
    text: str | None
    finish_reason: str | None  # "stop" (end token, stop string or stop token) or "length"; None with an error
    error: RowError | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    @classmethod
    def failed(cls, request: Request, error: RowError, *, token_ids: list[int] | None = None) -> Completion:
        """The result of a sample that failed, with the output tokens that it had."""
        return cls(
            row_index=request.row_index,
            sample_index=request.sample_index,
            num_prompt_tokens=len(request.token_ids),
            token_ids=token_ids or [],
            text=None,
            finish_reason=None,
            error=error,
        )


def stream_key(*, row_seed: int | None, job_seed: int, row_index: int, sample_index: int) -> int:
    """A 64-bit key for the random numbers of one sample.

    With a row seed it depends on (row seed, sample) alone, so that rows with one prompt and one seed agree wherever
    they stand; without one on (job seed, row ordinal, sample), so that it survives restarts and any sharding.
    """
    parts = ("row", row_seed, sample_index) if row_seed is not None else ("job", job_seed, row_index, sample_index)
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
