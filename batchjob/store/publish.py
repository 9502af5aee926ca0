"""How a finished file gets its final name: create-if-absent, so that the first writer wins and nobody overwrites.

`link` where the file system has hard links, else a rename that refuses to replace, else an exclusively created claim
followed by a rename. The method is probed once, when the output directory is made, and kept in job.json: all writers
of one output must use the same.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from batchjob.errors import OutputCreateError, StorageError
from batchjob.store.fsops import FsOps

LINK, RENAME_NOREPLACE, CLAIM = "link", "rename_noreplace", "claim"

# What a file system answers that lacks an operation.
_MISSING = (
    errno.EPERM,
    errno.EACCES,
    errno.ENOSYS,
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EMLINK,
    errno.EXDEV,
    errno.ENOTTY,
)


def probe(fs: FsOps, from_dir: Path, to_dir: Path) -> str:
    """The first method that works between two directories, tried twice: the second try must find the name taken."""
    trials: tuple[tuple[str, Callable[[Path, Path], None]], ...] = (
        (LINK, fs.link),
        (RENAME_NOREPLACE, fs.rename_noreplace),
        (CLAIM, fs.rename),
    )
    problems: list[str] = []
    for method, operation in trials:
        problem = _try(fs, operation, from_dir / "probe", to_dir / "probe", exclusive=method != CLAIM)
        if problem is None:
            return method
        problems.append(f"{method}: {problem}")
    raise OutputCreateError(
        f"the file system of {to_dir} has no operation that publishes a file safely ({'; '.join(problems)}). Choose an "
        "--output on another file system."
    )


def _try(
    fs: FsOps, operation: Callable[[Path, Path], None], source: Path, target: Path, *, exclusive: bool
) -> str | None:
    """Publishes a probe file, twice. Returns why the method cannot be used, or None."""
    try:
        fs.write_file(source, b"first")
        try:
            operation(source, target)
        except OSError as error:
            if error.errno in _MISSING:
                return error.strerror or str(error)
            raise
        if not exclusive:  # then it rests on exclusive creation
            try:
                fs.close(fs.create(target))
            except FileExistsError:
                return None
            return "a file was created although its name was taken"
        fs.unlink_if_there(source)
        fs.write_file(source, b"second")
        try:
            operation(source, target)
        except FileExistsError:
            return None if fs.read_file(target) == b"first" else "a taken name was replaced"
        except OSError as error:
            return error.strerror or str(error)
        return "a taken name was replaced"
    finally:
        for path in (source, target):
            fs.unlink_if_there(path)


def publish(fs: FsOps, method: str, tmp: Path, target: Path, *, claim: Path, is_dead: Callable[[str], bool]) -> bool:
    """Gives `tmp` the name `target`; False if another process was first. Raises OSError.

    `claim` is used by the claim method only: its content is the attempt that may rename, and one that `is_dead` is
    passed over.
    """
    if method == LINK:
        try:
            fs.link(tmp, target)
        except FileExistsError:
            # A server whose reply was lost did link it: then our file has two names.
            return fs.stat(tmp).st_nlink == 2
        return True
    if method == RENAME_NOREPLACE:
        try:
            fs.rename_noreplace(tmp, target)
        except FileExistsError:
            return False
        return True
    return _publish_by_claim(fs, tmp, target, claim=claim, is_dead=is_dead)


def _publish_by_claim(fs: FsOps, tmp: Path, target: Path, *, claim: Path, is_dead: Callable[[str], bool]) -> bool:
    attempt = tmp.name.split(".", 1)[1]
    try:
        fs.write_file(claim, attempt.encode())
    except FileExistsError:
        holder = fs.read_file(claim).decode(errors="replace")
        if fs.exists(target):
            return False
        if holder != attempt and not is_dead(holder):
            raise StorageError(
                f"{claim} is held by attempt {holder or '?'}, which has not published {target.name}. If no other "
                "batchjob works on this output, delete that file and run the same command again."
            ) from None
        fs.unlink_if_there(claim)
        fs.write_file(claim, attempt.encode())
    if fs.exists(target):
        return False
    fs.rename(tmp, target)
    return True
