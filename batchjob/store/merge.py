"""`merge`: the rows of a complete job as one Parquet file, a directory of large ones, or JSONL.

The source is read with its page checksums, every row is seen once and in order, the copy is written beside its final
name, fsynced, and renamed. An interrupted merge leaves nothing under the final name and is simply run again.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from batchjob.errors import OutputCreateError, StoppedEarlyError, StorageError, UsageError
from batchjob.plan import Chunk
from batchjob.spec import refuse_url
from batchjob.store.catalog import Catalog
from batchjob.store.context import StoreContext
from batchjob.store.creation import load_output
from batchjob.store.disk_errors import storage_errors
from batchjob.store.fsops import FsOps
from batchjob.store.mergefiles import JsonlWriter, MergeWriter, ParquetWriter
from batchjob.store.parts import BadPartError, read_tables
from batchjob.store.paths import Layout

FORMATS = ("parquet", "jsonl")
_ENDINGS = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}


def merge(
    output: str | Path, dest: str | Path, format: str | None = None, *, partial: bool = False, fs: FsOps | None = None
) -> int:
    """Copies the rows of `output` to `dest` and returns how many output rows there were.

    `format` is "parquet" or "jsonl"; None takes it from the ending of `dest`. Parquet becomes one file, or a directory
    of files if `dest` ends in "/". Raises UsageError for an ending that does not tell a format, StoppedEarlyError if
    the job is not complete (unless `partial`), OutputCreateError if `dest` exists, StorageError if a part is damaged.
    """
    fs = fs or FsOps()
    refuse_url(output, "OUTPUT")
    layout = Layout(Path(output).absolute())
    if (place := Path(dest).absolute()) == layout.root or layout.data in (place, *place.parents):
        raise UsageError(f"{layout.data} holds only parts; choose another place than {dest}")
    format = merge_format(dest, format)
    directory = str(dest).endswith("/")
    output, dest = layout.root, place
    manifest, plan = load_output(fs, output)
    context = StoreContext(fs, layout, manifest, attempt="merge")
    warnings: list[str] = []
    catalog = Catalog(context, plan, warnings, repair=False)
    committed = catalog.scan()
    if len(committed) < len(catalog.chunks) and not partial:
        raise StoppedEarlyError(
            f"{output} is not complete: {len(committed)} of {len(catalog.chunks)} parts are there"
            f"{f' ({warnings[0]})' if warnings else ''}. Run the job again, or merge what is there with --partial."
        )
    if fs.exists(dest):
        raise OutputCreateError(f"{dest} exists. Remove it, or choose another place.")
    tmp = dest.with_name(f".{dest.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    schema, num_rows = manifest.arrow_schema, catalog.totals.num_rows
    with storage_errors("writing", dest):
        fs.ensure_dirs(dest.parent)
        writer: MergeWriter | None = None
        try:
            writer = JsonlWriter(fs, tmp, schema) if format == "jsonl" else ParquetWriter(fs, tmp, schema, directory)
            for chunk in catalog.chunks:
                if chunk.index in committed:
                    _copy(context, chunk, writer)
            writer.finish(num_rows)
            _move(fs, tmp, dest)
        finally:
            if writer is not None:
                writer.abandon()
            fs.remove_tree(tmp)
    return num_rows


def merge_format(dest: str | Path, format: str | None = None) -> str:
    """The format to write: the one asked for, or that of the ending. Raises UsageError for a destination that cannot be
    merged to."""
    refuse_url(dest, "DESTINATION")
    is_directory = str(dest).endswith("/")
    format = format or ("parquet" if is_directory else _ENDINGS.get(Path(dest).suffix.lower()))
    if format is None:
        raise UsageError(
            f"{dest} does not say which format is wanted: end it in .parquet or .jsonl (or in / for a directory of "
            f"Parquet files), or give --format {' or '.join(FORMATS)}"
        )
    if format not in FORMATS:
        raise UsageError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    if is_directory and format == "jsonl":
        raise UsageError(f"JSONL is merged into one file; {dest} ends in /")
    return format


def _copy(context: StoreContext, chunk: Chunk, writer: MergeWriter) -> None:
    try:
        for table in read_tables(context.fs, context.layout.part(chunk.index), context.read_part(chunk)):
            writer.write(table)
    except BadPartError as error:
        raise StorageError(
            f"{context.layout.part(chunk.index)} is damaged: {error}. Nothing was merged. Move that "
            "file away and run the job again: its rows are computed again."
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
