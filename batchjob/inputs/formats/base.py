"""The interface of an input format. A new format is one file beside this one and one line in `table.py`.

A format whose rows stand one after the other in the bytes of a file derives from `row_format.RowFormat` and says how
to cut and to parse them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from batchjob.errors import InputMissingError
from batchjob.inputs.positions import Positions
from batchjob.plan import InputFile, Segment
from batchjob.records import Record


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file behind `--input` that has been looked at but not planned."""

    path: str  # absolute
    format: str  # a name in `table.FORMATS`
    compression: str  # "" | "gz" | "zst" | "xz" | "bz2"


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """`step`: chunks begin at multiples of so many rows; a scan may double it unless `is_step_fixed`."""

    step: int
    is_step_fixed: bool
    max_row_bytes: int


class Scan(ABC):
    """One pass over the files of a job, all of one format, in order: their rows, columns and types.

    Bad rows are rows too. `columns` maps every input column to its kind (see `JobPlan.columns`), `null_columns` are
    those without one value, whatever their kind says; both are complete after `finish`. `step`: chunks begin at
    multiples of so many rows.
    """

    def __init__(self) -> None:
        self.step = 1
        self.warnings: list[str] = []
        self.num_bad_rows = 0
        self.first_bad_row = ""
        self.columns: dict[str, str] = {}
        self.null_columns: frozenset[str] = frozenset()

    @abstractmethod
    def add(self, file: FoundFile, size: int, limit: int | None) -> tuple[int, str]:
        """Scans the next file of `size` bytes, at most `limit` rows of it. Returns the number of its rows and the kind
        of digest (see `stamps.digest`) that shall tell whether it changes. Raises InputDataError."""

    @abstractmethod
    def finish(self) -> None:
        """Ends the pass. Raises InputDataError where the files do not fit together."""

    @abstractmethod
    def schema(self, kept: Sequence[str]) -> pa.Schema:
        """The Arrow types of these columns over all files. Raises InputDataError where there is no common type."""

    def segment(self, file_index: int, first_row: int, num_rows: int, row_index: int) -> Segment:
        """A run of rows of one file; `row_index` is the global ordinal of its first row."""
        return Segment(file_index, first_row, num_rows)


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of one InputReader that its formats share."""

    positions: Positions
    kinds: Mapping[str, str]  # of the carried columns, as in `JobPlan.columns`
    schema: pa.Schema  # of the carried columns
    max_row_bytes: int


class Format(ABC):
    """One input format.

    `name` is kept in plans, `title` is for messages. Files are known by `magic`, the bytes that they begin with, or
    where a format has none (`magic` is empty) by `endings`, the lower-case ends of their names. A format with `magic`
    is binary: its files are never compressed as a whole.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    endings: ClassVar[tuple[str, ...]]
    magic: ClassVar[bytes] = b""

    @abstractmethod
    def scan(self, files: Sequence[FoundFile], options: ScanOptions) -> Scan:
        """Begins the pass over these files."""

    @abstractmethod
    def rows(
        self,
        reading: Reading,
        file: InputFile,
        segment: Segment,
        row_index: int,
        columns: Sequence[str] | None,
        skip: Container[int],
    ) -> Iterator[Record]:
        """The rows of a segment in order, but for those whose global ordinal is in `skip`. `row_index` is that of the
        first one. Records hold the named columns that the row has (None: all of them).

        Raises InputMissingError where the file no longer holds the rows that were planned.
        """

    @abstractmethod
    def carried(self, reading: Reading, file: InputFile, segment: Segment) -> pa.Table:
        """The carried columns of a segment, in `reading.schema`; nulls for rows that cannot be read."""

    @abstractmethod
    def check_values(self, path: str, column: str, type: pa.DataType, remedy: str) -> None:
        """Looks at one column of a file that has been scanned. Raises InputDataError, with the remedy, if a value does
        not fit the type."""

    def job_id(self, path: str) -> str | None:
        """The job that wrote this file, where the file says so. Raises InputDataError."""
        return None


def changed(file: InputFile) -> InputMissingError:
    """The error for a file that does not hold the planned rows."""
    return InputMissingError(
        f"input file {file.path} no longer holds the rows that were planned; "
        "put the old file back, or start a new output"
    )
