"""Parquet: planned from the footers alone, columns and types as the files name them."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator, Sequence
from typing import Any

import pyarrow as pa

from batchjob.errors import InputDataError
from batchjob.inputs.folders import partition_values
from batchjob.inputs.formats.base import Format, FoundFile, Reading, Scan, ScanOptions, changed
from batchjob.inputs.formats.parquet_columns import carried_batch, check_column, column_names, unify_schemas
from batchjob.inputs.formats.parquet_file import Undecodable, column_values, iter_batches, open_parquet
from batchjob.inputs.formats.parquet_footers import check_footers
from batchjob.inputs.positions import BUSY, Position
from batchjob.plan import InputFile, Segment
from batchjob.records import Record, RowError

_MAX_CARRIED_BYTES = 4 << 30  # of one chunk, decoded
_MAX_HASHED = 4 << 30  # bytes of files that are hashed whole, at 0.6 GB/s with reading; samples of those behind
_MAX_SKIPPED = 100_000  # rows that are decoded to read on rather than to open the file again
_LARGE_ROW_GROUP = 1 << 30  # bytes


class Parquet(Format):
    """Parquet files."""

    name = "parquet"
    title = "Parquet"
    endings = (".parquet", ".pq")
    magic = b"PAR1"

    def scan(self, files: Sequence[FoundFile], options: ScanOptions) -> Scan:
        check_footers([file.path for file in files])
        return ParquetScan()

    def rows(
        self,
        reading: Reading,
        file: InputFile,
        segment: Segment,
        row_index: int,
        columns: Sequence[str] | None,
        skip: Container[int],
    ) -> Iterator[Record]:
        last = row_index + segment.num_rows
        row = segment.first_row
        folders = partition_values(file.path)
        if columns is not None:
            folders = {name: value for name, value in folders.items() if name in columns}
        if columns is None:
            columns = open_parquet(file.path).schema_arrow.names
        for batch in _batches(reading, file, segment, columns):
            names = list(batch.schema.names)
            data = [column_values(batch, name) for name in names]
            for name in folders:
                if name not in names:
                    names.append(name)
                    data.append([folders[name]] * batch.num_rows)
            rows: Iterator[tuple[Any, ...]] = zip(*data, strict=True) if data else iter([()] * batch.num_rows)
            for values in rows:
                row += 1
                if row_index not in skip:
                    where = f"{file.path} row {row}"
                    error = None
                    if any(value.__class__ is Undecodable for value in values):
                        bad = next(n for n, v in zip(names, values, strict=True) if isinstance(v, Undecodable))
                        error = RowError("invalid_encoding", f"{where}: column {bad!r} is not UTF-8")
                    yield Record(row_index, dict(zip(names, values, strict=True)), where, error)
                row_index += 1
        if row_index != last:
            raise changed(file)

    def carried(self, reading: Reading, file: InputFile, segment: Segment) -> pa.Table:
        batches = []
        size = 0
        for found in _batches(reading, file, segment, reading.schema.names):
            batch = carried_batch(file.path, found, reading.schema)
            if batch is None:
                raise changed(file)
            batches.append(batch)
            size += batch.nbytes
            if size > _MAX_CARRIED_BYTES:
                raise InputDataError(
                    f"{file.path}: the kept columns of {segment.num_rows:,} rows take more than "
                    f"{_MAX_CARRIED_BYTES >> 20:,} MiB; leave large ones out with --keep-columns, or use a smaller "
                    "--chunk-rows"
                )
        return pa.Table.from_batches(batches, schema=reading.schema)

    def check_values(self, path: str, column: str, type: pa.DataType, remedy: str) -> None:
        check_column(path, column, type, remedy)

    def job_id(self, path: str) -> str | None:
        """Parts of a job, and copies of them, have it in the footer."""
        with open_parquet(path) as file:
            found: bytes | None = (file.metadata.metadata or {}).get(b"batchjob.job_id")
        return None if found is None else found.decode(errors="replace")


def _batches(reading: Reading, file: InputFile, segment: Segment, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    names = tuple(columns)
    return reading.positions.take(segment, names, lambda: BatchPosition(file, segment, names))


class BatchPosition(Position[pa.RecordBatch]):
    """An open position in a Parquet file, for one list of columns."""

    def __init__(self, file: InputFile, segment: Segment, columns: Sequence[str]) -> None:
        self.row = segment.first_row
        self._batches: Generator[pa.RecordBatch, None, None] = iter_batches(file.path, segment.first_row, columns)
        self._rest: pa.RecordBatch | None = None

    def reaches(self, segment: Segment) -> bool:
        return segment.first_row - self.row <= _MAX_SKIPPED

    def take(self, segment: Segment) -> Iterator[pa.RecordBatch]:
        skip, left = segment.first_row - self.row, segment.num_rows
        self.row = BUSY
        try:
            while left > 0:
                batch = self._rest if self._rest is not None else next(self._batches, None)
                self._rest = None
                if batch is None:
                    return
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                batch = batch.slice(skip)
                skip = 0
                if batch.num_rows > left:
                    self._rest = batch.slice(left)
                    batch = batch.slice(0, left)
                left -= batch.num_rows
                yield batch
        finally:
            self.row = segment.first_row + segment.num_rows - left

    def close(self) -> None:
        self._batches.close()


class ParquetScan(Scan):
    """The pass over the footers of all files."""

    def __init__(self) -> None:
        super().__init__()
        self._schemas: list[tuple[str, pa.Schema]] = []  # by path
        self._num_bytes = 0

    def add(self, file: FoundFile, size: int, limit: int | None) -> tuple[int, str]:
        with open_parquet(file.path) as found:
            self._schemas.append((file.path, found.schema_arrow))
            metadata = found.metadata
        count = metadata.num_rows if limit is None else min(limit, metadata.num_rows)
        largest = max((metadata.row_group(g).total_byte_size for g in range(metadata.num_row_groups)), default=0)
        if largest > _LARGE_ROW_GROUP:
            gibibytes = f"{largest / (1 << 30):.1f} GiB"
            self.warnings.append(
                f"{file.path} has a row group of {gibibytes}; resuming inside it decodes its start again"
            )
        self._num_bytes += size
        return count, "sha256" if self._num_bytes <= _MAX_HASHED else "samples"

    def finish(self) -> None:
        self.columns = dict.fromkeys(column_names(self._schemas), "parquet")

    def schema(self, kept: Sequence[str]) -> pa.Schema:
        return unify_schemas(self._schemas, kept)
