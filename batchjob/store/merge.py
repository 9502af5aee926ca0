"""`merge`: the rows of a complete job as one Parquet file, a directory of large ones, or JSONL.

The source is read with its page checksums, every row is seen once and in order, the copy is written beside its final
name, fsynced, and renamed. An interrupted merge leaves nothing under the final name and is simply run again.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchjob.errors import OutputCreateError, StoppedEarlyError, StorageError, UsageError
from batchjob.plan import Chunk
from batchjob.store.catalog import Catalog
from batchjob.store.context import StoreContext
from batchjob.store.counts import Counts
from batchjob.store.creation import load_output
from batchjob.store.fsops import FsOps, Sink, storage_errors
from batchjob.store.jsontext import row_texts
from batchjob.store.layout import Layout
from batchjob.store.parts import BadPartError, read_tables

FORMATS = ("parquet", "parquet-dir", "jsonl")
_GROUP_ROWS = 131_072  # of a row group, unless it has many bytes
_GROUP_BYTES = 64 * 2**20
_FILE_BYTES = 384 * 2**20  # of a file in a directory
_BATCH_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge wrote. `counts` are output rows."""

    path: Path
    format: str
    num_files: int
    num_bytes: int
    counts: Counts


def merge(
    output: Path, dest: Path, format: str | None = None, *, partial: bool = False, fs: FsOps | None = None
) -> Merged:
    """Copies the rows of `output` to `dest`. Without a format, the ending of `dest` decides: `.parquet`, `.jsonl`, or
    a directory of Parquet files for anything else.

    Raises StoppedEarlyError if the job is not complete (unless `partial`), OutputCreateError if `dest` exists,
    StorageError if a part is damaged.
    """
    fs = fs or FsOps()
    output, dest = Path(output).absolute(), Path(dest).absolute()
    if format is None:
        format = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}.get(dest.suffix, "parquet-dir")
    if format not in FORMATS:
        raise UsageError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    manifest, plan = load_output(fs, output)
    layout = Layout(output)
    if dest in (layout.data, output) or layout.data in dest.parents:
        raise UsageError(f"{layout.data} holds only parts; choose another place than {dest}")
    context = StoreContext(fs, layout, manifest, attempt="merge")
    warnings: list[str] = []
    catalog = Catalog(context, plan, warnings, repair=False)
    committed = catalog.scan()
    if len(committed) < len(catalog.chunks) and not partial:
        raise StoppedEarlyError(
            f"{output} is not complete: {len(committed)} of {len(catalog.chunks)} parts are there"
            f"{f' ({warnings[0]})' if warnings else ''}. Run the job again first."
        )
    if fs.exists(dest):
        raise OutputCreateError(f"{dest} exists. Remove it, or choose another place.")
    chunks = [chunk for chunk in catalog.chunks if chunk.index in committed]
    tmp = dest.with_name(f".{dest.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with storage_errors("writing", dest):
        fs.ensure_dirs(dest.parent)
        schema = manifest.arrow_schema
        writer: _Writer = (
            _JsonlWriter(fs, tmp, schema)
            if format == "jsonl"
            else _ParquetWriter(fs, tmp, schema, directory=format == "parquet-dir")
        )
        try:
            for chunk in chunks:
                _copy(context, chunk, writer)
            num_files, num_bytes = writer.finish(catalog.totals.num_rows)
            _move(fs, tmp, dest)
        finally:
            writer.abandon()
            fs.remove_tree(tmp)
    return Merged(dest, format, num_files, num_bytes, catalog.totals)


def _copy(context: StoreContext, chunk: Chunk, writer: _Writer) -> None:
    try:
        for table in read_tables(context.fs, context.layout.part(chunk.index), context.read_part(chunk)):
            writer.write(table)
    except BadPartError as error:
        raise StorageError(
            f"{context.layout.part(chunk.index)} is damaged: {error}. Nothing was merged. Move that "
            "file away and run the job again: its rows are computed anew."
        ) from error


def _move(fs: FsOps, tmp: Path, dest: Path) -> None:
    try:
        fs.rename_noreplace(tmp, dest)
    except FileExistsError:
        raise OutputCreateError(f"{dest} was made by another process meanwhile. Choose another place.") from None
    except OSError:
        # No such rename on this file system. A directory that has something in it is not replaced in any case.
        if fs.exists(dest):
            raise
        fs.rename(tmp, dest)
    fs.fsync_dir(dest.parent)


class _Writer(Protocol):
    """Takes the rows in order. `finish` makes them durable and checks them; `abandon` lets go of what is open."""

    def write(self, table: pa.Table) -> None: ...

    def finish(self, num_rows: int) -> tuple[int, int]:
        """Number of files and of bytes. Raises OSError unless `num_rows` rows are on disk."""

    def abandon(self) -> None: ...


class _ParquetWriter:
    """One file, or a directory of files of about `_FILE_BYTES`. Batches are joined into large row groups."""

    def __init__(self, fs: FsOps, path: Path, schema: pa.Schema, *, directory: bool) -> None:
        self._fs = fs
        self._path = path
        self._schema = schema
        self._directory = directory
        self._files: list[Path] = []
        self._num_bytes = 0
        self._sink: Sink | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []
        if directory:
            fs.mkdir(path)
        self._open()

    def write(self, table: pa.Table) -> None:
        self._pending.append(pa.Table.from_arrays(table.columns, schema=self._schema))
        num_rows = sum(table.num_rows for table in self._pending)
        if num_rows >= _GROUP_ROWS or sum(table.nbytes for table in self._pending) >= _GROUP_BYTES:
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
            self._pending = []
            self._parquet.write_table(group, row_group_size=max(1, group.num_rows))

    def _close(self) -> None:
        assert self._parquet is not None
        assert self._sink is not None
        self._parquet.close()
        self._num_bytes += self._sink.finish()

    def finish(self, num_rows: int) -> tuple[int, int]:
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
        return len(self._files), self._num_bytes

    def abandon(self) -> None:
        if self._sink is not None:
            self._sink.abandon()


class _JsonlWriter:
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

    def finish(self, num_rows: int) -> tuple[int, int]:
        num_bytes = self._sink.finish()
        on_disk = self._fs.stat(self._path).st_size
        if self._num_rows != num_rows or on_disk != num_bytes:
            raise OSError(f"{self._num_rows} rows and {on_disk} bytes were written, not {num_rows} and {num_bytes}")
        return 1, num_bytes

    def abandon(self) -> None:
        self._sink.abandon()
