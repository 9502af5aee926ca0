"""Open positions in input files: reading on from where the last chunk ended, instead of from the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import pyarrow as pa

from batchjob.inputs.formats import parquet
from batchjob.inputs.streams import iter_lines
from batchjob.plan import InputFile, Segment
from batchjob.records import RowError

_BUSY = 1 << 62  # the row of a position while somebody reads from it

Line = tuple[int, int, bytes | RowError]


class LinePosition:
    """An open position in a JSONL file: the row to come next is `row`."""

    def __init__(self, file: InputFile, segment: Segment, max_row_bytes: int) -> None:
        self.row = segment.first_row
        self._lines = iter_lines(
            file.path,
            file.compression,
            offset=segment.byte_offset,
            line=segment.line,
            max_line_bytes=max_row_bytes,
        )

    def take(self, segment: Segment) -> Iterator[Line]:
        skip, self.row = segment.first_row - self.row, _BUSY
        for _ in islice(self._lines, skip):
            pass
        count = 0
        try:
            for item in islice(self._lines, segment.num_rows):
                count += 1
                yield item
        finally:
            self.row = segment.first_row + count

    def close(self) -> None:
        self._lines.close()  # type: ignore[attr-defined]  # a generator


class BatchPosition:
    """An open position in a Parquet file, for one list of columns."""

    def __init__(self, file: InputFile, segment: Segment, columns: Sequence[str]) -> None:
        self.row = segment.first_row
        self._batches = parquet.iter_batches(file.path, segment.first_row, columns)
        self._rest: pa.RecordBatch | None = None

    def take(self, segment: Segment) -> Iterator[pa.RecordBatch]:
        skip, left = segment.first_row - self.row, segment.num_rows
        self.row = _BUSY
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
        self._batches.close()  # type: ignore[attr-defined]  # a generator
