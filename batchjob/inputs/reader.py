"""Rows of a chunk, as `Record`s for the prompts and as an Arrow table for the output.

A reader keeps a few open positions, so that chunks read one after the other never start a compressed file or a
Parquet row group again. Memory is bounded by a block of a file and one chunk's carried columns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import pyarrow as pa

from batchjob.inputs.formats.base import Reading, changed
from batchjob.inputs.formats.table import format_of
from batchjob.inputs.positions import Positions
from batchjob.inputs.stamps import check_size, check_unchanged
from batchjob.plan import Chunk, InputFile, JobPlan, Segment
from batchjob.records import Record

MAX_ROW_BYTES = 64 << 20


class InputReader:
    """Reads chunks of a plan. Not thread-safe. `warnings` gathers files that were touched but not changed.

    Raises InputMissingError where an input file is gone or no longer what was planned.
    """

    def __init__(self, plan: JobPlan, *, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self._files = plan.files
        schema = pa.ipc.read_schema(pa.py_buffer(plan.arrow_schema))
        self._reading = Reading(Positions(), dict(plan.columns), schema, max_row_bytes)
        self._seen: dict[int, tuple[int, int]] = {}  # file -> its times when its content was last compared
        self.warnings: list[str] = []

    def rows(self, chunk: Chunk, columns: Sequence[str] | None, *, skip: Container[int] = ()) -> Iterator[Record]:
        """The chunk's rows in order, but for those whose global ordinal is in `skip`.

        `fields` holds the named columns that the row has (None: all of them).
        """
        row_index = chunk.row_index
        for segment in chunk.segments:
            file = self._checked(segment)
            yield from format_of(file).rows(self._reading, file, segment, row_index, columns, skip)
            row_index += segment.num_rows
            self._checked(segment)  # or it changed while it was read

    def carried(self, chunk: Chunk) -> pa.Table:
        """The chunk's carried columns: `chunk.num_rows` rows in the plan's schema, nulls for rows that cannot be read.

        A JSON column holds the value's JSON text as it was written in the file.
        """
        schema = self._reading.schema
        if not schema.names:
            for segment in chunk.segments:
                self._checked(segment)
            return _no_columns(chunk.num_rows)
        tables = []
        for segment in chunk.segments:
            file = self._checked(segment)
            table = format_of(file).carried(self._reading, file, segment)
            if table.num_rows != segment.num_rows:
                raise changed(file)
            tables.append(table)
            self._checked(segment)
        if not tables:
            return schema.empty_table()
        return pa.concat_tables(tables).replace_schema_metadata(schema.metadata)

    def compare(self, chunks: Iterable[Chunk], file_index: int) -> None:
        """Reads the rows of a file that belong to these chunks. Raises InputMissingError where they are not those whose
        digests the plan has."""
        file = self._files[file_index]
        for segment in (segment for chunk in chunks for segment in chunk.segments if segment.file_index == file_index):
            for _ in format_of(file).rows(self._reading, file, segment, 0, (), range(segment.num_rows)):
                pass

    def close(self) -> None:
        self._reading.positions.close()

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


def _no_columns(num_rows: int) -> pa.Table:
    """A table with rows but without columns."""
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))])
