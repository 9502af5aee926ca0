"""The messages between a feeder and its child, pickles of plain values.

Down go a FeederConfig without chunks, then an `Order` for each chunk. Up come frames, which are a length and a pickle:
`Ready` once the tokeniser is loaded; for each batch `Begun`, perhaps some `Beat`s, and `Packed`; and a `Failure` as the
last word.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import IO, Any

from batchjob import errors
from batchjob.errors import BatchJobError, FeederError
from batchjob.plan import Chunk
from batchjob.prompts.feeder.batches import FedBatch
from batchjob.records import Prompt, RowError

HEADER = Struct("<Q")


@dataclass(frozen=True, slots=True)
class Order:
    """A chunk to read. `skip` and `alone` are ordinals of rows, as int64; see `Source.batches`."""

    chunk: Chunk
    skip: bytes
    alone: bytes
    poisoned: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Begun:
    """These rows (int64) are being built, and a silence of so many seconds is too long."""

    rows: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class Beat:
    """One more of the rows has a text."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A FedBatch in few objects: token ids as one array of int32."""

    chunk_index: int
    last: bool
    warnings: tuple[str, ...]
    rows: bytes
    lengths: bytes
    tokens: bytes
    params: dict[int, Any]
    errors: dict[int, tuple[str, str]]

    @classmethod
    def of(cls, batch: FedBatch) -> Packed:
        tokens = array("i")
        for prompt in batch.prompts:
            tokens.extend(prompt.token_ids)
        return cls(
            batch.chunk_index,
            batch.last,
            batch.warnings,
            array("q", [prompt.row_index for prompt in batch.prompts]).tobytes(),
            array("q", [len(prompt.token_ids) for prompt in batch.prompts]).tobytes(),
            tokens.tobytes(),
            {i: prompt.params for i, prompt in enumerate(batch.prompts) if prompt.params is not None},
            {i: (p.error.type, p.error.message) for i, p in enumerate(batch.prompts) if p.error is not None},
        )

    def batch(self) -> FedBatch:
        tokens = array("i", self.tokens).tolist()
        prompts: list[Prompt] = []
        start = 0
        params, failed = self.params, self.errors
        for i, (row, length) in enumerate(zip(array("q", self.rows), array("q", self.lengths), strict=True)):
            stop = start + length
            error = RowError(*failed[i]) if i in failed else None
            prompts.append(Prompt(row, tokens[start:stop], params.get(i), error))
            start = stop
        return FedBatch(self.chunk_index, prompts, self.last, self.warnings)


@dataclass(frozen=True, slots=True)
class Failure:
    kind: str
    message: str

    @classmethod
    def of(cls, error: BatchJobError) -> Failure:
        return cls(type(error).__name__, str(error))

    def error(self) -> BatchJobError:
        kind: type[BatchJobError] = getattr(errors, self.kind, FeederError)
        return kind(self.message)


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(HEADER.pack(len(data)) + data if len(data) < 1 << 16 else HEADER.pack(len(data)))
    if len(data) >= 1 << 16:
        pipe.write(data)
    pipe.flush()
