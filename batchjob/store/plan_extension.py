"""The plan of a job: the one it began with, and one more file for each time that new input files were added."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from batchjob.errors import StorageError
from batchjob.plan import JobPlan
from batchjob.store.checks import check_plan
from batchjob.store.context import StoreContext
from batchjob.store.fsops import FsOps, storage_errors
from batchjob.store.paths import Layout
from batchjob.store.plan_files import checksum, join_plans, plan_from_bytes, plan_to_bytes


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
