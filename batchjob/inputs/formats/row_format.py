"""Formats whose rows stand one after the other in the bytes of a file, and whose values alone say their types.

Such a format says how to cut the bytes into rows and how to parse one; the pass over all files, reading on from any
row, and the carried columns are the same for all of them.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Container, Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import pyarrow as pa

from batchjob.errors import InputDataError
from batchjob.inputs.digests import MASK, RawRow, row_digest, same_rows
from batchjob.inputs.folders import is_of_folders, partition_values
from batchjob.inputs.formats.base import Format, FoundFile, Reading, Scan, ScanOptions, changed
from batchjob.inputs.formats.column_types import MAX_COLUMNS, ColumnTypes
from batchjob.inputs.positions import BUSY, Position
from batchjob.inputs.row_index import RowIndex
from batchjob.plan import InputFile, Segment
from batchjob.records import Record, RowError

_CARRIED_ROWS = 2_000
_CARRIED_BYTES = 64 << 20

Parsed = tuple[dict[str, Any] | None, RowError | None]


class RowFormat(Format):
    """A format that is cut into rows. `row_noun` and `advice` are for the message about a file without one good row."""

    row_noun: ClassVar[str]
    advice: ClassVar[str]

    @abstractmethod
    def raw_rows(
        self, path: str, compression: str, *, offset: int = 0, line: int = 1, max_row_bytes: int
    ) -> Generator[RawRow, None, None]:
        """(byte offset, line number, bytes) of each row from the row at `offset`, which is on `line`, to the end of the
        file. Offsets are those of the decompressed bytes. A row that is too large and a damaged end of the file come as
        a RowError. Equal files give equal rows wherever reading starts."""

    @abstractmethod
    def parse(self, raw: bytes) -> Parsed:
        """The values of one row by column, or an error. A row that had to be mended gives both."""

    def json_texts(self, raw: bytes, columns: Collection[str]) -> Mapping[str, str]:
        """The JSON text of the values of some columns of a row without error; null and absent values are left out."""
        row = self.parse(raw)[0] or {}
        return {name: json.dumps(row[name], ensure_ascii=False) for name in columns if row.get(name) is not None}

    def check_first_row(self, path: str, raw: bytes) -> None:
        """Raises InputDataError where the bad first row of a file shows that the file is of another kind."""

    def scan(self, files: Sequence[FoundFile], options: ScanOptions) -> Scan:
        return RowScan(self, options)

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
        parse = self.parse
        folders = partition_values(file.path)
        for _, line, raw in self._planned_rows(reading, file, segment):
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
            raise changed(file)

    def carried(self, reading: Reading, file: InputFile, segment: Segment) -> pa.Table:
        folders = partition_values(file.path)
        marked = [field.name for field in reading.schema if is_of_folders(field)]
        folders = {name: folders[name] for name in marked if name in folders}
        batches = []
        for piece in _pieces(self._planned_rows(reading, file, segment)):
            batches.append(self._carried_batch(reading, file, piece, folders))
        return pa.Table.from_batches(batches, schema=reading.schema)

    def check_values(self, path: str, column: str, type: pa.DataType, remedy: str) -> None:
        """Nothing to do: the scan has seen every value."""

    def _planned_rows(self, reading: Reading, file: InputFile, segment: Segment) -> Iterator[RawRow]:
        rows = reading.positions.take(segment, None, lambda: RowPosition(self, file, segment, reading.max_row_bytes))
        return same_rows(file, segment, rows) if segment.digest else rows

    def _carried_batch(
        self, reading: Reading, file: InputFile, rows: list[RawRow], folders: Mapping[str, str | None]
    ) -> pa.RecordBatch:
        kinds = reading.kinds
        typed = [name for name, kind in kinds.items() if kind != "json"]
        as_json = [name for name, kind in kinds.items() if kind == "json"]
        values: dict[str, list[Any]] = {name: [] for name in kinds}
        for _, _, raw in rows:
            row, error = (None, raw) if isinstance(raw, RowError) else self.parse(raw)
            if row is None:
                for column in values.values():
                    column.append(None)
                continue
            for name in typed:
                values[name].append(row.get(name))
            if as_json:
                assert isinstance(raw, bytes)
                if error is None:
                    texts: Mapping[str, Any] = self.json_texts(raw, as_json)
                else:  # mended: there is no text to copy from
                    texts = {name: json_text(row.get(name)) for name in as_json}
                for name in as_json:
                    values[name].append(texts.get(name))
            for name, text in folders.items():
                if values[name][-1] is None and text is not None:
                    values[name][-1] = _typed(kinds[name], text)
        try:
            arrays = [pa.array(values[field.name], field.type) for field in reading.schema]
        except (pa.ArrowException, OverflowError) as error:
            raise changed(file) from error
        return pa.RecordBatch.from_arrays(arrays, schema=reading.schema)


class RowPosition(Position[RawRow]):
    """An open position in a file of a RowFormat. A compressed file can be opened at its start only."""

    def __init__(self, format: RowFormat, file: InputFile, segment: Segment, max_row_bytes: int) -> None:
        self._is_compressed = bool(file.compression)
        start = Segment(segment.file_index, 0, 0) if self._is_compressed else segment
        self.row = start.first_row
        self._rows = format.raw_rows(
            file.path, file.compression, offset=start.byte_offset, line=start.line, max_row_bytes=max_row_bytes
        )

    def reaches(self, segment: Segment) -> bool:
        # A plain file seeks for less than it costs to read on.
        return self._is_compressed or self.row == segment.first_row

    def take(self, segment: Segment) -> Iterator[RawRow]:
        skip, self.row = segment.first_row - self.row, BUSY
        for _ in islice(self._rows, skip):
            pass
        count = 0
        try:
            for item in islice(self._rows, segment.num_rows):
                count += 1
                yield item
        finally:
            self.row = segment.first_row + count

    def close(self) -> None:
        self._rows.close()


class RowScan(Scan):
    """The pass over all files of a RowFormat: every row is parsed, and the places of some are kept."""

    def __init__(self, format: RowFormat, options: ScanOptions) -> None:
        super().__init__()
        self._format = format
        self._max_row_bytes = options.max_row_bytes
        self._types = ColumnTypes()
        self._index = RowIndex(options.step, is_fixed=options.is_step_fixed)
        self._paths: list[str] = []
        self._empty: list[str] = []
        self._num_rows = self._digests = self._next_point = 0  # over all files

    def add(self, file: FoundFile, size: int, limit: int | None) -> tuple[int, str]:
        parse, add_types, types, index = self._format.parse, self._types.add, self._types, self._index
        path = file.path
        digests = index.bounds[self._num_rows] = self._digests
        count = num_good = 0
        first_bad = ""
        is_whole = True
        total = self._num_rows
        rows = self._format.raw_rows(path, file.compression, max_row_bytes=self._max_row_bytes)
        for offset, line, raw in rows:
            if count == limit:
                is_whole = False
                break
            if total == self._next_point:
                index.add(offset, line, digests)
                self._next_point = total + index.step - total % index.step
            row, error = (None, raw) if isinstance(raw, RowError) else parse(raw)
            if row is not None:
                num_good += 1
                add_types(row)
                if len(types) > MAX_COLUMNS:
                    raise InputDataError(
                        f"{path}:{line}: the rows have more than {MAX_COLUMNS} different keys; "
                        "put varying keys into one object"
                    )
            if error is not None:
                where = f"{path}:{line}: {error.message}"
                first_bad = first_bad or where
                self._note_bad_row(error, where)
                if row is None and not count and isinstance(raw, bytes):
                    self._format.check_first_row(path, raw)
            digests = digests + row_digest(count, raw) & MASK
            count += 1
            total += 1
        if count and not num_good and (is_whole or not len(types)):
            raise InputDataError(
                f"{path}: not one of its {count:,} rows is {self._format.row_noun}; first: {first_bad}. "
                f"{self._format.advice}"
            )
        if not count and is_whole:
            self._empty.append(path)
        self._paths.append(path)
        self._num_rows, self._digests = total, digests
        return count, "sha256" if is_whole else "ends"

    def _note_bad_row(self, error: RowError, where: str) -> None:
        self.num_bad_rows += 1
        self.first_bad_row = self.first_bad_row or where
        if error.type == "input_damaged":
            self.warnings.append(where)

    def finish(self) -> None:
        self._index.bounds[self._num_rows] = self._digests
        self.step = self._index.step
        if self._empty and len(self._paths) > 1:
            number = f"{len(self._empty):,} input files hold" if len(self._empty) > 1 else "1 input file holds"
            self.warnings.append(f"{number} no rows: {self._empty[0]}" + " ..." * (len(self._empty) > 1))
        if len(self._types):
            self._types.add_folders(self._paths)
        self.columns = self._types.kinds()
        self.null_columns = self._types.only_null()

    def schema(self, kept: Sequence[str]) -> pa.Schema:
        return self._types.schema(kept, self._paths)

    def segment(self, file_index: int, first_row: int, num_rows: int, row_index: int) -> Segment:
        offset, line = self._index.place(row_index) if first_row else (0, 1)
        content = self._index.digest(row_index, row_index + num_rows)
        return Segment(file_index, first_row, num_rows, offset, line, content)


def json_text(value: Any) -> str | None:
    """JSON text of a value that has no text of its own to be copied from; None stays None."""
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _typed(kind: str, text: str) -> Any:
    """The value of a folder's name in a column of this kind."""
    return int(text) if kind == "int64" else json_text(text) if kind == "json" else text


def _pieces(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    """The rows in lists of bounded number and size: few rows are Python objects at a time, and no column of a list
    comes near the 2 GiB that one Arrow array of text can hold."""
    piece: list[RawRow] = []
    size = 0
    for row in rows:
        piece.append(row)
        size += len(row[2]) if isinstance(row[2], bytes) else 0
        if len(piece) == _CARRIED_ROWS or size >= _CARRIED_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
