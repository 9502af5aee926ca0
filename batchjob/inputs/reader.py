"""Rows of a chunk, as `Record`s for the prompts and as an Arrow table for the output.

A reader keeps a few open positions, so that chunks read one after the other never start a compressed file or a
Parquet row group again. Memory is bounded by a block of a file and one chunk's carried columns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchjob.errors import InputDataError, InputMissingError
from batchjob.inputs.columns import carried_batch, is_of_folders
from batchjob.inputs.digests import same_lines
from batchjob.inputs.find import check_size, check_unchanged
from batchjob.inputs.formats import jsonl, parquet
from batchjob.inputs.names import partition_values
from batchjob.inputs.positions import BatchPosition, Line, LinePosition
from batchjob.plan import Chunk, InputFile, JobPlan, Segment
from batchjob.records import Record, RowError

MAX_ROW_BYTES = 64 << 20
_MAX_CARRIED_BYTES = 4 << 30  # of one chunk, decoded
_MAX_POSITIONS = 4
_CARRIED_ROWS = 2_000
_CARRIED_BYTES = 64 << 20


class InputReader:
    """Reads chunks of a plan. Not thread-safe. `warnings` gathers files that were touched but not changed.

    Raises InputMissingError where an input file is gone or no longer what was planned.
    """

    def __init__(self, plan: JobPlan, *, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self._files = plan.files
        self._kinds = dict(plan.columns)
        self._schema = pa.ipc.read_schema(pa.py_buffer(plan.arrow_schema))
        self._folder_fields = [field for field in self._schema if is_of_folders(field)]
        self._max_row_bytes = max_row_bytes
        self._positions: dict[tuple[int, tuple[str, ...] | None, int], LinePosition | BatchPosition] = {}
        self._next_key = 0
        self._seen: dict[int, tuple[int, int]] = {}  # file -> its times when its content was last compared
        self.warnings: list[str] = []

    def rows(self, chunk: Chunk, columns: Sequence[str] | None, *, skip: Container[int] = ()) -> Iterator[Record]:
        """The chunk's rows in order, but for those whose global ordinal is in `skip`.

        `fields` holds the named columns that the row has (None: all of them).
        """
        row_index = chunk.row_index
        for segment in chunk.segments:
            file = self._checked(segment)
            make = self._jsonl_rows if file.format == "jsonl" else self._parquet_rows
            yield from make(file, segment, row_index, columns, skip)
            row_index += segment.num_rows
            self._checked(segment)  # or it changed while it was read

    def carried(self, chunk: Chunk) -> pa.Table:
        """The chunk's carried columns: `chunk.num_rows` rows in the plan's schema, nulls for rows that cannot be read.

        A JSON column holds the value's JSON text as it was written in the file.
        """
        if not self._schema.names:
            for segment in chunk.segments:
                self._checked(segment)
            return _no_columns(chunk.num_rows)
        tables = []
        for segment in chunk.segments:
            file = self._checked(segment)
            make = self._jsonl_carried if file.format == "jsonl" else self._parquet_carried
            table = make(file, segment)
            if table.num_rows != segment.num_rows:
                raise _changed(file)
            tables.append(table)
            self._checked(segment)
        if not tables:
            return self._schema.empty_table()
        return pa.concat_tables(tables).replace_schema_metadata(self._schema.metadata)

    def compare(self, chunks: Iterable[Chunk], file_index: int) -> None:
        """Reads the lines of a JSONL file that belong to these chunks. Raises InputMissingError where they changed."""
        for segment in (segment for chunk in chunks for segment in chunk.segments if segment.file_index == file_index):
            for _ in self._lines(self._files[file_index], segment):
                pass

    def close(self) -> None:
        for position in self._positions.values():
            position.close()
        self._positions.clear()

    # -- positions

    def _checked(self, segment: Segment) -> InputFile:
        file = self._files[segment.file_index]
        stat = check_size(file)
        times = stat.st_mtime_ns, stat.st_ctime_ns
        if self._seen.get(segment.file_index) != times:
            warning = check_unchanged(file)
            self._seen[segment.file_index] = times
            if warning is not None and warning not in self.warnings:
                self.warnings.append(warning)
        return file

    def _lines(self, file: InputFile, segment: Segment) -> Iterator[Line]:
        position = self._position(segment, None)
        # A plain file seeks for less than it costs to read on; a compressed one cannot seek.
        if position is None or (not file.compression and position.row != segment.first_row):
            start = segment if not file.compression else Segment(segment.file_index, 0, 0)
            position = self._keep(LinePosition(file, start, self._max_row_bytes), segment.file_index, None)
        assert isinstance(position, LinePosition)
        lines = position.take(segment)
        return same_lines(file, segment, lines) if segment.digest else lines

    def _batches(self, file: InputFile, segment: Segment, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        names = tuple(columns)
        position = self._position(segment, names)
        if position is None or segment.first_row - position.row > 100_000:
            position = self._keep(BatchPosition(file, segment, names), segment.file_index, names)
        assert isinstance(position, BatchPosition)
        return position.take(segment)

    def _position(self, segment: Segment, columns: tuple[str, ...] | None) -> LinePosition | BatchPosition | None:
        """The open position closest before the segment, if any."""
        best = None
        for key, position in self._positions.items():
            if (
                key[:2] == (segment.file_index, columns)
                and position.row <= segment.first_row
                and (best is None or position.row > self._positions[best].row)
            ):
                best = key
        if best is None:
            return None
        found = self._positions.pop(best)
        self._positions[best] = found  # most recently used last
        return found

    def _keep(
        self, position: LinePosition | BatchPosition, file_index: int, columns: tuple[str, ...] | None
    ) -> LinePosition | BatchPosition:
        while len(self._positions) >= _MAX_POSITIONS:
            self._positions.pop(next(iter(self._positions))).close()
        self._next_key += 1
        self._positions[file_index, columns, self._next_key] = position
        return position

    # -- JSONL

    def _jsonl_rows(
        self,
        file: InputFile,
        segment: Segment,
        row_index: int,
        columns: Sequence[str] | None,
        skip: Container[int],
    ) -> Iterator[Record]:
        last = row_index + segment.num_rows
        parse = jsonl.parse_row
        folders = partition_values(file.path)
        for _, line, raw in self._lines(file, segment):
            if row_index not in skip:
                row, error = (None, raw) if isinstance(raw, RowError) else parse(raw)
                where = f"{file.path}:{line}"
                if error is not None:
                    error = RowError(error.type, f"{where}: {error.message}")
                if row is None:
                    row = {}
                elif folders:
                    row |= {name: value for name, value in folders.items() if row.get(name) is None}
                if row and columns is not None:
                    row = {name: row[name] for name in columns if name in row}
                yield Record(row_index, row, where, error)
            row_index += 1
        if row_index != last:
            raise _changed(file)

    def _jsonl_carried(self, file: InputFile, segment: Segment) -> pa.Table:
        lines = self._lines(file, segment)
        folders = partition_values(file.path)
        folders = {field.name: folders[field.name] for field in self._folder_fields if field.name in folders}
        batches = []
        for piece in _pieces(lines):
            batches.append(self._carried_batch(file, piece, folders))
        return pa.Table.from_batches(batches, schema=batches[0].schema if batches else self._schema)

    def _carried_batch(self, file: InputFile, lines: list[Line], folders: Mapping[str, str | None]) -> pa.RecordBatch:
        typed = [name for name, kind in self._kinds.items() if kind != "json"]
        as_json = [name for name, kind in self._kinds.items() if kind == "json"]
        values: dict[str, list[Any]] = {name: [] for name in self._kinds}
        for _, _, raw in lines:
            row, error = (None, raw) if isinstance(raw, RowError) else jsonl.parse_row(raw)
            if row is None:
                for column in values.values():
                    column.append(None)
                continue
            for name in typed:
                values[name].append(row.get(name))
            if as_json:
                assert isinstance(raw, bytes)
                if error is None:
                    texts: dict[str, Any] = jsonl.raw_values(raw.decode(), as_json)
                else:  # mended: there is no line to copy from
                    texts = {name: jsonl.json_text(row.get(name)) for name in as_json}
                for name in as_json:
                    values[name].append(texts.get(name))
            for name, text in folders.items():
                if values[name][-1] is None and text is not None:
                    values[name][-1] = _typed(self._kinds[name], text)
        try:
            arrays = [pa.array(values[field.name], field.type) for field in self._schema]
        except (pa.ArrowException, OverflowError) as error:
            raise _changed(file) from error
        if not arrays:
            return parquet.empty_batch(len(lines))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    # -- Parquet

    def _parquet_rows(
        self,
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
            columns = parquet.open_parquet(file.path).schema_arrow.names
        for batch in self._batches(file, segment, columns):
            names = list(batch.schema.names)
            data = [parquet.column_values(batch, name) for name in names]
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
                    if any(value.__class__ is parquet.Undecodable for value in values):
                        bad = next(n for n, v in zip(names, values, strict=True) if isinstance(v, parquet.Undecodable))
                        error = RowError("invalid_encoding", f"{where}: column {bad!r} is not UTF-8")
                    yield Record(row_index, dict(zip(names, values, strict=True)), where, error)
                row_index += 1
        if row_index != last:
            raise _changed(file)

    def _parquet_carried(self, file: InputFile, segment: Segment) -> pa.Table:
        batches = []
        size = 0
        for found in self._batches(file, segment, self._schema.names):
            batch = carried_batch(file.path, found, self._schema)
            if batch is None:
                raise _changed(file)
            batches.append(batch)
            size += batch.nbytes
            if size > _MAX_CARRIED_BYTES:
                raise InputDataError(
                    f"{file.path}: the kept columns of {segment.num_rows:,} rows take more than "
                    f"{_MAX_CARRIED_BYTES >> 20:,} MiB; leave large ones out with --keep-columns, or use a smaller "
                    "--chunk-rows"
                )
        return pa.Table.from_batches(batches, schema=self._schema)


def _typed(kind: str, text: str) -> Any:
    """A value of a folder's name in a JSONL column of this kind."""
    return int(text) if kind == "int64" else jsonl.json_text(text) if kind == "json" else text


def _pieces(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """The lines in lists of bounded number and size: few rows are Python objects at a time, and no column of a list
    comes near the 2 GiB that one Arrow array of text can hold."""
    piece: list[Line] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line[2]) if isinstance(line[2], bytes) else 0
        if len(piece) == _CARRIED_ROWS or size >= _CARRIED_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _changed(file: InputFile) -> InputMissingError:
    return InputMissingError(
        f"input file {file.path} no longer holds the rows that were planned; "
        "put the old file back, or start a new output"
    )


def _no_columns(num_rows: int) -> pa.Table:
    """A table with rows but without columns."""
    return pa.Table.from_batches([parquet.empty_batch(num_rows)])


def read_rows(
    plan: JobPlan,
    chunk: Chunk,
    columns: Sequence[str] | None,
    *,
    skip: Container[int] = (),
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[Record]:
    """One chunk's rows, see `InputReader.rows`. Keep an InputReader to read several chunks."""
    reader = InputReader(plan, max_row_bytes=max_row_bytes)
    try:
        yield from reader.rows(chunk, columns, skip=skip)
    finally:
        reader.close()


def read_carried(plan: JobPlan, chunk: Chunk, *, max_row_bytes: int = MAX_ROW_BYTES) -> pa.Table:
    """One chunk's carried columns, see `InputReader.carried`. Keep an InputReader to read several chunks."""
    reader = InputReader(plan, max_row_bytes=max_row_bytes)
    try:
        return reader.carried(chunk)
    finally:
        reader.close()
