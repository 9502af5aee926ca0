"""The files that `merge` writes: Parquet with large row groups, or JSONL."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchjob.store.fsops import FsOps, Sink
from batchjob.store.jsontext import row_texts

_GROUP_ROWS = 131_072  # of a row group, unless it has many bytes
_GROUP_BYTES = 64 * 2**20
_FILE_BYTES = 384 * 2**20  # of a file in a directory
_BATCH_ROWS = 8_192


class MergeWriter(Protocol):
    """Takes the rows in order. `finish` makes them durable and checks them; `abandon` closes the open files."""

    def write(self, table: pa.Table) -> None: ...

    def finish(self, num_rows: int) -> None:
        """Raises OSError unless `num_rows` rows are on disk."""

    def abandon(self) -> None: ...


class ParquetWriter:
    """One file, or a directory of files of about `_FILE_BYTES`. Batches are joined into large row groups."""

    def __init__(self, fs: FsOps, path: Path, schema: pa.Schema, directory: bool) -> None:
        self._fs = fs
        self._path = path
        self._schema = schema
        self._directory = directory
        self._files: list[Path] = []
        self._sink: Sink | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        if directory:
            fs.mkdir(path)
        self._open()

    def write(self, table: pa.Table) -> None:
        self._pending.append(pa.Table.from_arrays(table.columns, schema=self._schema))
        self._pending_rows += table.num_rows
        self._pending_bytes += table.nbytes
        if self._pending_rows >= _GROUP_ROWS or self._pending_bytes >= _GROUP_BYTES:
            self._write_group()

    def _open(self) -> None:
        path = self._path / f"part-{len(self._files):05d}.parquet" if self._directory else self._path
        self._sink = Sink(self._fs, path)
        self._files.append(path)
        self._parquet = pq.ParquetWriter(
            self._sink, self._schema, version="2.6", compression="zstd", write_page_checksum=True
        )

    def _write_group(self) -> None:
        assert self._sink is not None
        if self._directory and self._sink.tell() >= _FILE_BYTES:
            self._close()
            self._open()
        if self._pending and self._parquet is not None:
            group = pa.concat_tables(self._pending)
            self._pending, self._pending_rows, self._pending_bytes = [], 0, 0
            self._parquet.write_table(group, row_group_size=max(1, group.num_rows))

    def _close(self) -> None:
        assert self._parquet is not None
        assert self._sink is not None
        self._parquet.close()
        self._sink.finish()

    def finish(self, num_rows: int) -> None:
        self._write_group()
        self._close()
        if self._directory:
            self._fs.fsync_dir(self._path)
        have = 0
        for path in self._files:
            with self._fs.open_read(path) as file:
                have += pq.read_metadata(file).num_rows
        if have != num_rows:
            raise OSError(f"{have} rows were written, not {num_rows}")

    def abandon(self) -> None:
        if self._sink is not None:
            self._sink.abandon()


class JsonlWriter:
    """One JSON object per line; `jsontext` has the rules."""

    def __init__(self, fs: FsOps, path: Path, schema: pa.Schema) -> None:
        self._fs = fs
        self._path = path
        self._schema = schema
        self._sink = Sink(fs, path)
        self._num_rows = 0

    def write(self, table: pa.Table) -> None:
        table = pa.Table.from_arrays(table.columns, schema=self._schema)
        for batch in table.to_batches(_BATCH_ROWS):
            lines = row_texts(batch)
            self._num_rows += len(lines)
            self._sink.write("".join(line + "\n" for line in lines).encode())

    def finish(self, num_rows: int) -> None:
        num_bytes = self._sink.finish()
        on_disk = self._fs.stat(self._path).st_size
        if self._num_rows != num_rows or on_disk != num_bytes:
            raise OSError(f"{self._num_rows} rows and {on_disk} bytes were written, not {num_rows} and {num_bytes}")

    def abandon(self) -> None:
        self._sink.abandon()
