"""Parquet files: their footers, and batches of rows from any row on, with bounded memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchjob.errors import InputDataError
from batchjob.inputs.streams import open_bytes
from batchjob.json_values import is_binary, json_values

_BATCH_BYTES = 8 << 20  # decoded bytes aimed at per batch
_WORST_BATCH_BYTES = 256 << 20  # and never exceeded, but by a single row
_MAX_THRIFT_STRING = 100 << 20  # bytes of one text in a footer
_MAX_THRIFT_ITEMS = 1_000_000  # of one list in a footer: row groups, columns, pairs of metadata


def open_parquet(path: str) -> pq.ParquetFile:
    """Reads the footer only. Column chunks are streamed, not loaded whole. Raises InputDataError.

    pyarrow reads at any offset, so it opens the file itself; other bytes of inputs come from `streams.open_bytes`.
    """
    try:
        file = pq.ParquetFile(
            pa.OSFile(os.fsencode(path)),  # a path as text would have to be UTF-8
            buffer_size=1 << 20,
            pre_buffer=False,
            page_checksum_verification=True,
            coerce_int96_timestamp_unit="us",  # as nanoseconds, the default, the year 9999 would wrap to 1816
            thrift_string_size_limit=_MAX_THRIFT_STRING,
            thrift_container_size_limit=_MAX_THRIFT_ITEMS,
        )
        _ = file.schema_arrow.names  # its names must be text, too
        return file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputDataError(f"{path} cannot be read as Parquet: {error}") from error


def iter_batches(path: str, first_row: int, columns: Sequence[str]) -> Generator[pa.RecordBatch, None, None]:
    """Batches of the named columns from `first_row` to the end of the file.

    Row groups before `first_row` are skipped through the footer; seeking inside a row group decodes its start.
    Names that the file lacks are left out. Raises InputDataError naming the file and the row.
    """
    file = open_parquet(path)
    try:
        metadata = file.metadata
        group, start = 0, 0
        while group < metadata.num_row_groups and start + metadata.row_group(group).num_rows <= first_row:
            start += metadata.row_group(group).num_rows
            group += 1
        names = [name for name in columns if name in file.schema_arrow.names]
        row = start
        try:
            for g in range(group, metadata.num_row_groups):
                if not names:  # no column asked for: the row counts alone matter
                    count = metadata.row_group(g).num_rows
                    yield from _empty_batches(count - max(0, first_row - row), 4096)
                    row += count
                    continue
                size = _batch_rows(path, metadata.row_group(g), names)
                for batch in file.iter_batches(size, row_groups=[g], columns=names, use_threads=False):
                    skip = min(max(0, first_row - row), batch.num_rows)
                    row += batch.num_rows
                    if skip < batch.num_rows:
                        yield batch.slice(skip)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputDataError(f"{path} cannot be read after row {row}: {error}") from error
    finally:
        file.close()


def _batch_rows(path: str, group: pq.RowGroupMetaData, names: Sequence[str]) -> int:
    """Rows per batch of a row group: by its average row, and small enough for its worst one.

    A dictionary makes rows of any length out of a few bits each, so what a row takes in the file says nothing. The
    longest value it can give is the whole dictionary page.
    """
    average = max(group.total_byte_size, 1) // max(group.num_rows, 1)
    usual: int = max(16, min(4096, _BATCH_BYTES // max(average, 1)))
    wanted = set(names)
    worst: int = 1
    for i in range(group.num_columns):
        column = group.column(i)
        if (
            column.physical_type == "BYTE_ARRAY"
            and column.has_dictionary_page
            and column.path_in_schema.partition(".")[0] in wanted
        ):
            with closing(open_bytes(path, "", column.dictionary_page_offset)) as source:
                worst += _page_size(source.read(16)) or column.total_uncompressed_size
    return max(1, min(usual, _WORST_BATCH_BYTES // worst))


def _page_size(header: bytes) -> int | None:
    """The decoded size of a page from the start of its header, in Thrift's compact protocol: field 1 is the type of the
    page, field 2 this size, both 32-bit integers. None if it does not begin so."""
    at = 0
    size = 0
    for _ in range(2):
        if header[at : at + 1] != b"\x15":
            return None
        at += 1
        size = shift = 0
        while True:
            if at >= len(header) or shift > 28:
                return None
            byte = header[at]
            size |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
    return size >> 1 if size & 1 == 0 else None  # zigzag: even numbers are the positive ones


def _empty_batches(rows: int, batch_size: int) -> Iterator[pa.RecordBatch]:
    while rows > 0:
        count = min(rows, batch_size)
        yield empty_batch(count)
        rows -= count


def empty_batch(num_rows: int) -> pa.RecordBatch:
    """Rows without columns."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))


def column_values(batch: pa.RecordBatch, name: str) -> list[Any]:
    """The values of one column as `json_values` gives them; text that is not UTF-8 becomes an `Undecodable`.

    A column of binary data stays that, so that its base64 is not taken for text.
    """
    column = batch.column(name)
    if is_binary(column.type):
        return list(column.to_pylist())
    try:
        return json_values(column)
    except UnicodeDecodeError:
        return [_one_value(column.slice(i, 1)) for i in range(len(column))]


class Undecodable:
    """Stands for a Parquet string that is not UTF-8."""


def _one_value(array: pa.Array) -> Any:
    try:
        return json_values(array)[0]
    except UnicodeDecodeError:
        return Undecodable()
