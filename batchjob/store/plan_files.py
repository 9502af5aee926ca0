"""The plan of a job: the file that it began with, and one more for each time that new input files were added.

A plan file is an Arrow IPC file: one row per chunk; input files, columns and the schema in the metadata. An extension
of a job holds its new files and chunks only. job.json, which is never written again, cannot hold its checksum: it holds
its own, over its content and the checksum of the plan file before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from batchjob.errors import StorageError
from batchjob.plan import Chunk, InputFile, JobPlan, Segment
from batchjob.store.checks import check_plan
from batchjob.store.context import StoreContext
from batchjob.store.disk_errors import storage_errors
from batchjob.store.fsops import FsOps
from batchjob.store.paths import Layout

_SEGMENT = pa.struct(
    [
        pa.field("file_index", pa.int64(), nullable=False),
        pa.field("first_row", pa.int64(), nullable=False),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("byte_offset", pa.int64(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
    ]
)
_CHUNKS = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("row_index", pa.int64(), nullable=False),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("segments", pa.list_(_SEGMENT), nullable=False),
    ]
)


def load_plan(fs: FsOps, layout: Layout, first_checksum: str) -> tuple[JobPlan, str]:
    """The whole plan, and the checksum of its last file. Raises StorageError if one of the files is damaged."""
    with storage_errors("reading", layout.plan):
        data = fs.read_file(layout.plan)
        names = set(fs.listdir(layout.plan.parent))
    last = checksum(data)
    if last != first_checksum:
        raise StorageError(
            f"{layout.plan} is damaged: its checksum is not the one in job.json. Restore it from a copy."
        )
    plan = _parse(layout.plan, lambda: plan_from_bytes(data))
    while (path := layout.extension(plan.num_extensions + 1)).name in names:
        with storage_errors("reading", path):
            data = fs.read_file(path)
        plan = _parse(path, partial(_join, plan, data, last))
        last = checksum(data)
    return plan, last


def _join(plan: JobPlan, data: bytes, previous: str) -> JobPlan:
    return join_plans(plan, plan_from_bytes(data, previous=previous))


def _parse(path: Path, parse: Callable[[], JobPlan]) -> JobPlan:
    """The plan, checked. Raises StorageError if it is none."""
    try:
        plan = parse()
        check_plan(plan)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} is damaged ({error}). Restore it from a copy.") from error
    return plan


def publish_extension(context: StoreContext, plan: JobPlan, extension: JobPlan) -> bool:
    """Appends the files and chunks of `extension` to a job whose plan is `plan`.

    False if another process has extended the job since that plan was read. Raises StorageError.
    """
    fs, layout = context.fs, context.layout
    now, last = load_plan(fs, layout, context.manifest.plan_digest)
    if now.num_extensions != plan.num_extensions:
        return False
    join_plans(now, extension)  # raises for one that does not fit
    target = layout.extension(now.num_extensions + 1)
    tmp = layout.tmp / f"plan.{context.attempt}"
    with storage_errors("writing", target):
        fs.unlink_if_there(tmp)
        fs.write_file(tmp, plan_to_bytes(extension, previous=last))
        won = context.publish(tmp, target)
        fs.fsync_dir(target.parent)
        fs.unlink_if_there(tmp)
    return won


def plan_to_bytes(plan: JobPlan, *, previous: str = "") -> bytes:
    """The file's content. Paths that are not UTF-8 survive: JSON escapes their bytes, Arrow strings would not.

    `previous` is the checksum of the plan file that this one extends.
    """
    metadata = {
        b"files": json.dumps([_stamp(file) for file in plan.files]).encode(),
        b"columns": json.dumps(list(plan.columns.items())).encode(),
        b"arrow_schema": plan.arrow_schema,
    }
    if digests := _digests(plan):
        metadata[b"digests"] = json.dumps(digests).encode()
    metadata[b"ctimes"] = json.dumps([file.ctime_ns for file in plan.files]).encode()
    if previous:
        metadata[b"chain"] = _chain(plan, previous).encode()
    chunks = pa.Table.from_pylist(
        [
            {
                "index": chunk.index,
                "row_index": chunk.row_index,
                "num_rows": chunk.num_rows,
                "segments": [_place(segment) for segment in chunk.segments],
            }
            for chunk in plan.chunks
        ],
        schema=_CHUNKS.with_metadata(metadata),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, chunks.schema) as writer:
        writer.write_table(chunks)
    return bytes(sink.getvalue())


def plan_from_bytes(data: bytes, *, previous: str = "") -> JobPlan:
    """Raises ValueError (pa.ArrowInvalid is one) or KeyError if the bytes are no plan, or do not follow `previous`."""
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    metadata = table.schema.metadata or {}
    columns = [table.column(name).to_pylist() for name in _CHUNKS.names]
    files = json.loads(metadata[b"files"])
    ctimes: list[int] = json.loads(metadata.get(b"ctimes", b"[]")) or [0] * len(files)
    digests: list[list[str]] = json.loads(metadata.get(b"digests", b"[]")) or [[""] * len(s) for s in columns[-1]]
    plan = JobPlan(
        files=tuple(InputFile(**file, ctime_ns=ctime) for file, ctime in zip(files, ctimes, strict=True)),
        chunks=tuple(
            Chunk(
                index,
                row_index,
                num_rows,
                tuple(Segment(**place, digest=digest) for place, digest in zip(places, known, strict=True)),
            )
            for index, row_index, num_rows, places, known in zip(*columns, digests, strict=True)
        ),
        columns=dict(json.loads(metadata[b"columns"])),
        arrow_schema=metadata[b"arrow_schema"],
    )
    if previous and metadata[b"chain"].decode() != _chain(plan, previous):
        raise ValueError("it does not follow the plan before it")
    return plan


def checksum(data: bytes) -> str:
    """The checksum of a plan file that job.json and the next plan file hold."""
    return hashlib.sha256(data).hexdigest()


def join_plans(plan: JobPlan, extension: JobPlan) -> JobPlan:
    """A plan with the files and chunks of an extension after its own. Raises ValueError unless these follow on."""
    next_row = plan.chunks[-1].row_index + plan.chunks[-1].num_rows if plan.chunks else 0
    for index, chunk in enumerate(extension.chunks, len(plan.chunks)):
        if (chunk.index, chunk.row_index) != (index, next_row):
            raise ValueError(f"its chunk {chunk.index} is not the one that follows row {next_row}")
        next_row += chunk.num_rows
    return replace(
        plan,
        files=plan.files + extension.files,
        chunks=plan.chunks + extension.chunks,
        num_extensions=plan.num_extensions + 1,
    )


def _chain(plan: JobPlan, previous: str) -> str:
    chunks = [{**asdict(chunk), "segments": [_place(segment) for segment in chunk.segments]} for chunk in plan.chunks]
    content: list[object] = [previous, [_stamp(file) for file in plan.files], chunks]
    if digests := _digests(plan):
        content.append(digests)
    return checksum(json.dumps(content).encode())


def _stamp(file: InputFile) -> dict[str, object]:
    """A file in the form that earlier versions read and wrote."""
    stamp = asdict(file)
    del stamp["ctime_ns"]
    return stamp


def _place(segment: Segment) -> dict[str, int]:
    """The place of a segment without the digest of its content: the form that earlier versions read and wrote."""
    place = asdict(segment)
    del place["digest"]
    return place


def _digests(plan: JobPlan) -> list[list[str]]:
    """The digests of the segments of each chunk; none where no segment has one."""
    digests = [[segment.digest for segment in chunk.segments] for chunk in plan.chunks]
    return digests if any(any(known) for known in digests) else []
