"""What can be told before a model is loaded: whether job.json makes sense, whether the disk is too small."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from batchjob.errors import StorageError
from batchjob.store.columns import OutputColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjob.job.settings import Settings
    from batchjob.plan import Chunk, JobPlan
    from batchjob.spec import JobSpec
    from batchjob.store.manifest import Manifest

_ROW_BYTES = 60  # of the columns that every output row has, compressed
_USUAL_TOKENS = 200  # of an output whose length nobody has limited to less
_PACKED = 0.4  # size of carried columns in a part, of their size in a plain file of text
_OPEN_ROWS_FACTOR = 4  # a row in a log takes more than in a part; logs hold open chunks only


def expected_bytes(spec: JobSpec, settings: Settings, plan: JobPlan, todo: Sequence[Chunk]) -> int:
    """About what the chunks still to do will take. A guess: how much a model writes is known afterwards."""
    num_rows = sum(chunk.num_rows for chunk in todo)
    if not num_rows:
        return 0
    tokens = min(settings.sampling.max_tokens or _USUAL_TOKENS, _USUAL_TOKENS)
    per_output = _ROW_BYTES + tokens * sum(column.bytes_per_token for column in OutputColumns.asked(spec).columns)
    generated = num_rows * settings.sampling.n * per_output
    in_logs = max(chunk.num_rows for chunk in todo) * settings.sampling.n * per_output * _OPEN_ROWS_FACTOR
    carried = 0.0
    if plan.columns:
        from batchjob.inputs.formats.table import format_of

        packed = sum(file.size * (1 if file.compression or format_of(file).magic else _PACKED) for file in plan.files)
        carried = packed * num_rows / max(plan.num_rows, 1)
    return int(generated + in_logs + carried)


def space_warning(output: Path, needed: int, num_files: int) -> str | None:
    """A line for a person if the file system of `output` is unlikely to hold `needed` bytes in `num_files` files."""
    try:
        status = os.statvfs(output)
    except OSError:
        return None
    free = status.f_bavail * status.f_frsize
    if free < needed:
        return (
            f"warning: {output} has {_size(free)} free, and this job may need about {_size(needed)}. When the disk is "
            "full it waits for room, then stops with exit code 74; nothing that is finished is lost."
        )
    if status.f_files and status.f_favail < num_files:
        return f"warning: {output} has {status.f_favail:,} free inodes, and this job needs about {num_files:,}"
    return None


def _size(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"


def refuse_damaged_settings(manifest: Manifest, source: Path) -> None:
    """What a resume takes over from job.json is checked like any input. Raises StorageError."""
    resolved, chunk_rows = manifest.resolved, manifest.fingerprint.get("chunk_rows")
    model, columns = resolved.get("model"), resolved.get("columns")
    names = [resolved.get("revision"), model.get("name") if isinstance(model, dict) else model]
    if (
        not isinstance(columns, list)
        or not all(isinstance(name, str) for name in columns)
        or not all(name is None or isinstance(name, str) for name in names)
        or resolved.get("dtype") not in ("float32", "bfloat16", "float16")
        or type(chunk_rows) is not int
        or not _is_time(resolved.get("clock"))
    ):
        raise StorageError(f"{source} is damaged: its settings are none that batchjob writes. Restore it from a copy.")


def _is_time(clock: object) -> bool:
    if clock is None:
        return True
    try:
        return isinstance(clock, str) and datetime.fromisoformat(clock) is not None
    except ValueError:
        return False
