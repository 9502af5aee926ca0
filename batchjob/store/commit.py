"""The commit of a chunk: from finished rows to a durable part, in the one order that loses nothing."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from batchjob import __version__
from batchjob.errors import StorageError
from batchjob.plan import Chunk
from batchjob.store.columns import OutputColumns
from batchjob.store.context import StoreContext
from batchjob.store.counts import RowCounts
from batchjob.store.disk_errors import storage_error, storage_errors
from batchjob.store.parts import BadPartError, ContentHash, PartInfo, count_rows, write_part
from batchjob.store.rows import Records
from batchjob.store.schema import carried_names

_MAX_TAKE_BYTES = 1 << 30  # of carried columns; an Arrow array of text holds 2 GiB


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a commit. `counts` are those of the part that stands: ours if `won`, else that of a faster
    process."""

    chunk_index: int
    num_rows: int  # input rows of the chunk
    counts: RowCounts  # output rows
    won: bool


def commit_chunk(
    context: StoreContext,
    chunk: Chunk,
    batches: Callable[[], Iterable[Records]],
    carried: pa.Table | None,
) -> Committed:
    """Writes, checks and publishes the part of a chunk, then removes its logs.

    `batches` gives the chunk's records, sorted; it is called again if a first file fails. Raises StorageError, and
    FileNotFoundError if a log that `batches` reads or the temporary file has gone.
    """
    target = context.layout.part(chunk.index)
    tables = PartTables(context.schema, context.columns, chunk, carried)
    tmp, info = _write_checked(context, chunk, tables, batches)
    try:
        won = context.publish(tmp, target)
    except FileNotFoundError:
        raise  # the process that finished the job has removed the file of a chunk that is published
    except OSError as error:
        raise storage_error(error, "publishing", target) from error
    if not won:
        info = winner_of(context, chunk)
    settle(context, chunk, tmp)
    return Committed(chunk.index, chunk.num_rows, info.counts, won)


def settle(context: StoreContext, chunk: Chunk, tmp: Path | None) -> None:
    """Makes the published name durable, and only then removes what the part was made from. Raises StorageError."""
    with storage_errors("syncing", context.layout.data):
        context.fs.fsync_dir(context.layout.data)
    if tmp is not None:
        _remove_tmp(context, tmp)
    context.remove_wal(chunk.index)


def winner_of(context: StoreContext, chunk: Chunk) -> PartInfo:
    """The footer of the part that another process published. Raises StorageError if that is no part of this job."""
    path = context.layout.part(chunk.index)
    try:
        with storage_errors("reading", path):
            return context.read_winner(chunk)
    except BadPartError as error:
        raise StorageError(
            f"{path} is there already, but {error}. Finished rows are kept in the logs; run the same command again: it "
            "moves the file to .batchjob/quarantine and continues."
        ) from error


def _write_checked(
    context: StoreContext,
    chunk: Chunk,
    tables: PartTables,
    batches: Callable[[], Iterable[Records]],
) -> tuple[Path, PartInfo]:
    """A part under a temporary name: written, fsynced, read back. A file that fails is never tried again; a new one is,
    once, unless the disk is full."""
    for trial in range(2):
        tmp = context.layout.part_tmp(chunk.index, context.attempt, trial=trial)
        totals = _Totals(context.columns)

        def info(totals: _Totals = totals) -> PartInfo:
            return PartInfo(
                job_id=context.manifest.job_id,
                fingerprint=context.manifest.fingerprint_digest,
                chunk_index=chunk.index,
                row_index=chunk.row_index,
                num_rows=chunk.num_rows,
                counts=totals.counts,
                content_hash=totals.hash.hexdigest(),
                writer=__version__,
                attempt=context.attempt,
            )

        try:
            written = write_part(context.fs, tmp, tables.schema, tables.make(batches(), totals), info)
            if context.read_part_at(tmp, chunk) != written:
                raise BadPartError("its footer is not what was written")
            return tmp, written
        except FileNotFoundError:
            _remove_tmp(context, tmp)
            raise
        except (OSError, BadPartError) as error:
            _remove_tmp(context, tmp)
            failure = error if isinstance(error, OSError) else OSError(errno.EIO, f"read back: {error}")
            if trial or failure.errno in (errno.ENOSPC, errno.EDQUOT):
                raise storage_error(failure, "writing", tmp) from error
    raise AssertionError("unreachable")


def _remove_tmp(context: StoreContext, path: Path) -> None:
    """Removes a temporary file if that is possible; otherwise it is swept later."""
    try:
        context.fs.unlink_if_there(path)
    except OSError:
        return


class _Totals:
    """The counts and the hash of the footer, gathered while the rows are written."""

    def __init__(self, columns: OutputColumns) -> None:
        self.counts = RowCounts()
        self.hash = ContentHash(columns)


@dataclass(frozen=True, slots=True)
class PartTables:
    """Makes the tables of a part from log records and the carried columns."""

    schema: pa.Schema
    columns: OutputColumns
    chunk: Chunk
    carried: pa.Table | None

    def __post_init__(self) -> None:
        names = carried_names(self.schema)
        if not names or not self.chunk.num_rows:
            return
        if self.carried is None or self.carried.num_rows != self.chunk.num_rows:
            have = 0 if self.carried is None else self.carried.num_rows
            raise ValueError(f"chunk {self.chunk.index} has {self.chunk.num_rows} rows, its carried columns {have}")
        for name in names:
            have, want = self.carried.schema.field(name).type, self.schema.field(name).type
            if have != want:
                raise ValueError(f"carried column {name!r} is of type {have}, the job's schema says {want}")

    def make(self, batches: Iterable[Records], totals: _Totals) -> Iterator[pa.Table]:
        for records in batches:
            values = self.columns.values(records)
            count_rows(totals.counts, values)
            totals.hash.update(values)
            carried = self._carried_of(values["row_index"])
            arrays = [
                pa.array(values[field.name], field.type) if field.name in values else carried[field.name]
                for field in self.schema
            ]
            yield pa.Table.from_arrays(arrays, schema=self.schema)

    def _carried_of(self, rows: list[int]) -> Mapping[str, pa.ChunkedArray]:
        """The carried columns of these rows, which are in order and may repeat."""
        if self.carried is None:
            return {}
        first = self.chunk.row_index
        if len(set(rows)) == len(rows) == rows[-1] - rows[0] + 1:
            table = self.carried.slice(rows[0] - first, len(rows))
        else:
            table = _take_rows(self.carried, [row - first for row in rows])
        return {name: table.column(name) for name in table.column_names}


def _take_rows(table: pa.Table, rows: list[int]) -> pa.Table:
    """Takes these rows, which are in order and may repeat. `Table.take` joins all chunks of a column, which must then
    fit into one array: larger ones are put together row by row, without a copy."""
    span = table.slice(rows[0], rows[-1] + 1 - rows[0])
    times = max(Counter(rows).values())
    if span.nbytes * times < _MAX_TAKE_BYTES:
        return span.take(pa.array([row - rows[0] for row in rows], pa.int64()))
    return pa.concat_tables([table.slice(row, 1) for row in rows])
