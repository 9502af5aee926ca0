"""Chunks to batches of prompts: the work of a feeder, in whichever process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from batchjob.plan import Chunk, JobPlan
from batchjob.prompts import PromptBuilder, PromptConfig
from batchjob.records import Prompt, Record, RowError

BATCH_ROWS = 256
_BATCH_WEIGHT = 1 << 20  # characters or so of prompt text in one batch
_WEIGHT_PER_SECOND = 20_000  # of the slowest tokeniser


@dataclass(frozen=True, slots=True)
class FeederConfig:
    """`tokenizer`: a local directory, or "fake". A process that takes longer than these times to load its tokeniser, or
    (on top of what the length of its rows explains) for a row, hangs; 0 for `load_seconds` is no limit."""

    plan: JobPlan
    prompt: PromptConfig
    tokenizer: str
    max_row_bytes: int = 64 << 20
    load_seconds: float = 3600.0
    row_seconds: float = 60.0
    tokenizer_digest: str = ""  # `ModelInfo.text_digest`: its files must still be those that it was made of


@dataclass(frozen=True, slots=True)
class FedBatch:
    """Some prompts of one chunk, in row order. `last` marks the end of the chunk, with or without prompts.

    `warnings` are about the input files.
    """

    chunk_index: int
    prompts: list[Prompt]
    last: bool
    warnings: tuple[str, ...] = ()


class PromptFeeder(Protocol):
    """The seam between the job and what makes its prompts."""

    def feed(self, chunk: Chunk, skip_rows: Collection[int] = ()) -> None:
        """Queues a chunk; rows whose global ordinal is in `skip_rows` are left out. Chunks come back in this order."""
        ...

    def poll(self, timeout: float = 0.0) -> list[FedBatch]:
        """The batches that are ready; waits up to `timeout` seconds for one. Raises the error of the input, if any."""
        ...

    def close(self) -> None: ...


class Source:
    """Reads and builds, chunk by chunk."""

    def __init__(self, config: FeederConfig) -> None:
        from batchjob.inputs.reader import InputReader
        from batchjob.prompts.tokenizer import load_tokenizer

        self._reader = InputReader(config.plan, max_row_bytes=config.max_row_bytes)
        self._columns = config.prompt.source.read
        self._builder = PromptBuilder(config.prompt, load_tokenizer(config.tokenizer, config.tokenizer_digest))
        self._row_seconds = config.row_seconds

    def batches(
        self,
        chunk: Chunk,
        skip_rows: Container[int],
        *,
        alone: Container[int] = (),
        poisoned: Mapping[int, str] | None = None,
        begin: Callable[[list[Record], float], None] | None = None,
        beat: Callable[[], None] | None = None,
    ) -> Iterator[FedBatch]:
        """Rows in `alone` are batches of their own. Those in `poisoned` get the error given there.

        `begin` gets the rows of each batch before they are built, and the seconds after which they, or after a `beat`
        the rest of them, take too long.
        """
        poisoned = poisoned or {}
        for records in in_batches(self._reader.rows(chunk, self._columns, skip=skip_rows), alone):
            if records[0].row_index in poisoned:
                error = RowError("tokenizer_crash", f"{records[0].where}: {poisoned[records[0].row_index]}")
                yield FedBatch(chunk.index, [self._builder.refuse(records[0], error)], False)
                continue
            if begin is not None:
                begin(records, self._row_seconds + sum(map(_weight, records)) / _WEIGHT_PER_SECOND)
            yield FedBatch(chunk.index, self._builder.build_many(records, beat), False)
        warnings = tuple(self._reader.warnings)
        self._reader.warnings.clear()
        yield FedBatch(chunk.index, [], True, warnings)

    def close(self) -> None:
        self._reader.close()


def in_batches(records: Iterable[Record], alone: Container[int] = ()) -> Iterator[list[Record]]:
    """At most 256 rows or about a million characters at a time, but always at least one row. A row whose ordinal is in
    `alone` is a batch of its own."""
    batch: list[Record] = []
    weight = 0
    for record in records:
        is_alone = record.row_index in alone
        if is_alone and batch:
            yield batch
            batch, weight = [], 0
        batch.append(record)
        weight += _weight(record)
        if is_alone or len(batch) >= BATCH_ROWS or weight >= _BATCH_WEIGHT:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _weight(record: Record) -> int:
    """About the characters of a row's fields."""
    total = 0
    for value in record.fields.values():
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, list):
            total += 4 * len(value)
            total += sum(len(str(item.get("content"))) for item in value if isinstance(item, dict))
    return total
