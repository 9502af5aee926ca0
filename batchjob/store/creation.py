"""Making an output directory, by any number of processes at once: the state directory appears whole or not at all.

Each builds a complete state directory under a name of its own and renames it to `.batchjob`, which works for one of
them only, since a directory that is not empty cannot be replaced. The others drop theirs and load the winner's.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from batchjob.errors import OutputCreateError, StorageError, UsageError
from batchjob.plan import JobPlan
from batchjob.store.attempts import attempt_record
from batchjob.store.disk_errors import create_errors, storage_error, storage_errors
from batchjob.store.fsops import FsOps
from batchjob.store.manifest import Manifest
from batchjob.store.paths import Layout, chunk_of_part
from batchjob.store.plan_files import checksum, load_plan, plan_to_bytes
from batchjob.store.publish import probe
from batchjob.store.reread import reread

_UNFINISHED = ".batchjob.new-"


def create_output(fs: FsOps, output: Path, manifest: Manifest, plan: JobPlan, attempt: str) -> None:
    """Makes `output`, unless it holds a job already. Raises OutputCreateError or StorageError."""
    layout = Layout(output)
    with create_errors(output):
        if exists(fs, output):
            return
        fs.ensure_dirs(output)
        fs.ensure_dir(layout.data)
        _refuse_foreign_parts(fs, layout)
        new = Layout(output, state_name=_UNFINISHED + attempt)
        try:
            _build(fs, new, manifest, plan, attempt)
            fs.rename(new.state, layout.state)
        except (OSError, OutputCreateError) as error:
            with suppress(OSError):
                fs.remove_tree(new.state)
            # Whatever the error was: if the job is there, another process was faster (and may have swept ours away).
            if not exists(fs, output):
                if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise OutputCreateError(
                        f"{layout.state} exists, but holds no job.json. Remove it, or choose another --output."
                    ) from None
                raise
        fs.fsync_dir(output)


def sweep_unfinished(fs: FsOps, output: Path) -> None:
    """Removes unfinished state directories. Once the job is there they are of no use, to living processes neither."""
    for name in fs.listdir(output):
        if name.startswith(_UNFINISHED):
            fs.remove_tree(output / name)


def anchor_output(fs: FsOps, output: Path) -> None:
    """Holds the output's directories open; see `anchors`. OUT and OUT/data may be links that the user has made.

    Raises OutputCreateError if the state directory is a link; a directory that is missing is reported when it is read.
    """
    layout = Layout(output)
    for path, follow in ((layout.root, True), (layout.state, False), (layout.data, True)):
        try:
            reread(partial(fs.anchor, path, follow=follow))
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            if path == layout.state and os.path.islink(path):
                raise OutputCreateError(
                    f"{path} is a symbolic link, which batchjob does not follow: it would write and remove files where "
                    "the link leads. Put the directory itself there, or choose another --output."
                ) from None
            continue
        except OSError as error:
            raise storage_error(error, "opening", path) from error


def restore_directories(fs: FsOps, layout: Layout) -> None:
    """Makes the directories that a job needs and that are gone: copies by way of an object store drop empty ones."""
    for path in (layout.data, *layout.directories):
        if not fs.exists(path):
            fs.ensure_dir(path)
        elif path != layout.data and fs.is_link(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    fs.anchor(layout.data, follow=True)


def refuse_two_file_systems(fs: FsOps, layout: Layout, attempt: str) -> None:
    """Raises OutputCreateError if a part could not be moved from the state directory to OUT/data, each with a mount of
    its own. Nothing is made: a rename of what is not there fails with another error on one file system."""
    nothing = f"nothing.{attempt}"
    try:
        fs.rename(layout.tmp / nothing, layout.data / nothing)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise OutputCreateError(
                f"{layout.data} and {layout.state} are on two file systems, or one is a mount of its own, so that no "
                "finished file can be moved from one to the other at once. Put both on one, or choose another --output."
            ) from None


def load_output(fs: FsOps, output: Path) -> tuple[Manifest, JobPlan]:
    """The job that an output directory holds. Raises UsageError if there is none, StorageError if it is damaged."""
    layout = Layout(output)
    try:
        with storage_errors("reading", layout.manifest):
            manifest = Manifest.from_bytes(fs.read_file(layout.manifest), source=str(layout.manifest))
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise UsageError(f"{output} is no output directory of batchjob: it has no .batchjob/job.json") from None
        raise
    return manifest, load_plan(fs, layout, manifest.plan_digest)[0]


def refuse_foreign_state(fs: FsOps, output: Path) -> None:
    """Raises OutputCreateError for a state directory, or one in it, that another user made and controls.
    From then on `fs` reads no file of another user, which a directory that others may write to can hold. Root trusts
    the path that it was given; BATCHJOB_TRUST_OUTPUT=1 trusts every user who may write there."""
    me, layout = os.geteuid(), Layout(output)
    if me == 0 or os.environ.get("BATCHJOB_TRUST_OUTPUT") == "1":
        return
    for path in (layout.state, *layout.directories):
        try:
            status = fs.stat(path)
        except OSError:
            continue  # the next read reports what is wrong
        if status.st_uid not in (me, 0):
            raise OutputCreateError(
                f"{path} belongs to another user (uid {status.st_uid}), who decides what is in it. If you work on one "
                "job with them, set BATCHJOB_TRUST_OUTPUT=1; otherwise choose another --output."
            )
    fs.owners = frozenset((me, 0))


def exists(fs: FsOps, output: Path) -> bool:
    try:
        return fs.exists(Layout(output).manifest)
    except NotADirectoryError:
        return False


def _build(fs: FsOps, new: Layout, manifest: Manifest, plan: JobPlan, attempt: str) -> None:
    """Writes a complete, durable state directory."""
    for path in (new.state, *new.directories):
        fs.mkdir(path)
    fs.write_file(new.attempt(attempt), attempt_record({}))
    method = probe(fs, new.tmp, new.quarantine)
    plan_bytes = plan_to_bytes(plan)
    fs.write_file(new.plan, plan_bytes)
    manifest = manifest.with_setup(link_method=method, plan_digest=checksum(plan_bytes))
    fs.write_file(new.manifest, manifest.to_bytes())
    for path in (*new.directories, new.state):
        fs.fsync_dir(path)


def _refuse_foreign_parts(fs: FsOps, layout: Layout) -> None:
    """Raises OutputCreateError for parts without their state: they cannot be resumed, and writing beside them would mix
    two jobs."""
    if any(chunk_of_part(name) is not None for name in fs.listdir(layout.data)) and not exists(fs, layout.root):
        raise OutputCreateError(
            f"{layout.data} holds parts, but {layout.state} is gone: the job cannot be resumed. The parts can be "
            "read as they are; choose another --output."
        )
