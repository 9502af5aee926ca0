"""The frozen plan: which input files, which rows, cut into which chunks. `inputs.planner` makes it, `store` keeps it.

Row identity is (input file, ordinal in it) = the global `row_index`; an id column of the user is data, never a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file as it was when planned. A changed file is refused on resume (exit 66)."""

    path: str  # absolute
    format: str  # a name in `inputs.formats.table`
    compression: str  # "" | "gz" | "zst" | "xz" | "bz2" (formats of text only)
    size: int  # bytes
    mtime_ns: int
    num_rows: int
    digest: str  # see inputs.stamps.digest; so that a mere touch can be told from a change
    ctime_ns: int = 0  # of the inode: a change cannot hide it, as it can the other; 0 in plans of earlier versions


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of rows of one file. `byte_offset` and `line` (JSONL) are where its first row starts."""

    file_index: int
    first_row: int  # ordinal within the file
    num_rows: int
    byte_offset: int = 0  # of the decompressed stream; 0 for Parquet
    line: int = 1  # physical line number at byte_offset, from 1
    digest: str = ""  # of its lines (see inputs.digests); none for Parquet, and in plans of earlier versions


@dataclass(frozen=True, slots=True)
class Chunk:
    """A fixed range of rows: the unit of commit, which becomes one part. May span small files."""

    index: int
    row_index: int  # global ordinal of its first row
    num_rows: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Deterministic in the inputs and `chunk_rows`; independent of the number of shards.

    `columns` maps every carried column in output order to how it is stored: "parquet" (type as in the input file,
    see `arrow_schema`), or for JSONL "int64" | "double" | "bool" | "string" | "json" (JSON text of the value).
    """

    files: tuple[InputFile, ...]
    chunks: tuple[Chunk, ...]
    columns: Mapping[str, str]
    arrow_schema: bytes  # serialized pyarrow schema (IPC) of the carried columns, in the same order
    num_extensions: int = 0  # how often new input files were added; their chunks follow those that were there

    @property
    def num_rows(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)
