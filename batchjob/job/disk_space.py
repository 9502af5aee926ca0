"""A guess before a model is loaded: whether the disk will hold the output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from batchjob.store.columns import OutputColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjob.job.settings import Settings
    from batchjob.plan import Chunk, JobPlan
    from batchjob.spec import JobSpec

_ROW_BYTES = 60  # of the columns that every output row has, compressed
_USUAL_TOKENS = 200  # of an output whose length is not limited to less
_PACKED = 0.4  # size of carried columns in a part, of their size in a plain file of text
_OPEN_ROWS_FACTOR = 4  # a row in a log takes more than in a part; logs hold open chunks only


def expected_bytes(spec: JobSpec, settings: Settings, plan: JobPlan, todo: Sequence[Chunk]) -> int:
    """Returns about how many bytes the chunks in `todo` will take. A guess: output lengths are known afterwards."""
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
    """Returns a warning if the file system of `output` is unlikely to hold `needed` bytes in `num_files` files."""
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
