"""Publication: a finished file gets its final name only if that is free, so that the first writer wins.

`link` where the file system has hard links, else a rename that refuses to replace, else a rename under a claim. The
method is probed once, when the output directory is made, and kept in job.json: all writers of one output must use the
same.
"""

from __future__ import annotations

import errno
import time
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
        if not exclusive:  # it rests on claims: directories that a rename does not replace
            return _try_claim(fs, source, target.with_name("probe-claim"))
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


def _try_claim(fs: FsOps, source: Path, target: Path) -> str | None:
    try:
        for path in (source, target):
            fs.mkdir(path)
            fs.write_file(path / "holder", b"")
        try:
            fs.rename(source, target)
        except OSError as error:
            return None if error.errno in (errno.EEXIST, errno.ENOTEMPTY) else error.strerror or str(error)
        return "a directory that was not empty was replaced"
    finally:
        for path in (source, target):
            fs.remove_tree(path)


def publish(
    fs: FsOps,
    method: str,
    tmp: Path,
    target: Path,
    *,
    claims: Path,
    attempt: str,
    is_dead: Callable[[str], bool],
    patience: float,
) -> bool:
    """Gives `tmp` the name `target`; False if that is taken: another process was first. Raises OSError.

    `claims` (a directory for claims), `attempt`, `is_dead` and `patience` (seconds to wait for another process) are for
    the claim method.
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
    claim = Claim(fs, claims, target.name, attempt)
    if not claim.acquire(target, is_dead=is_dead, patience=patience):
        return False
    try:
        if fs.exists(target):
            return False
        fs.rename(tmp, target)
        return True
    finally:
        claim.release()


class Claim:
    """The right to rename to a name, held between the check that it is free and the rename.

    A claim is a directory with one file in it, named after its holder. It is made elsewhere and renamed into place,
    which cannot replace a directory that has something in it: so it appears together with its holder's name, and what
    is taken from a dead holder is that holder's file, never a newer claim.
    """

    def __init__(self, fs: FsOps, claims: Path, name: str, attempt: str) -> None:
        self._fs = fs
        self._attempt = attempt
        self._path = claims / name.partition(".")[0]
        self._new = claims / f"{self._path.name}.{attempt}"

    def acquire(self, target: Path, *, is_dead: Callable[[str], bool], patience: float) -> bool:
        """Waits for the claim. False if `target` appears meanwhile. Raises StorageError after `patience` seconds behind
        one holder."""
        fs = self._fs
        self._stage()
        deadline = time.monotonic() + patience
        while not self._take():
            if fs.exists(target):
                fs.remove_tree(self._new)
                return False
            holders, dead = self._evict(is_dead)
            if holders and not dead:
                if time.monotonic() > deadline:
                    fs.remove_tree(self._new)
                    raise StorageError(
                        f"{self._path} is held by {', '.join(holders)}, which has not published {target.name}. If no "
                        "other batchjob works on this output, delete that directory and run the same command again."
                    )
                time.sleep(min(0.1, patience))
        return True

    def try_acquire(self, *, is_dead: Callable[[str], bool]) -> bool:
        """Takes the claim without waiting. False if it has a holder that is not known to be dead."""
        self._stage()
        while not self._take():
            holders, dead = self._evict(is_dead)
            if holders and not dead:
                self._fs.remove_tree(self._new)
                return False
        return True

    def _stage(self) -> None:
        self._fs.remove_tree(self._new)
        self._fs.mkdir(self._new)
        self._fs.write_file(self._new / self._attempt, b"")

    def _take(self) -> bool:
        try:
            self._fs.rename(self._new, self._path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return False
        return True

    def _evict(self, is_dead: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """Takes the claim from dead holders. Returns all holders there were, and the dead ones."""
        holders = self._holders()
        dead = [holder for holder in holders if holder == self._attempt or is_dead(holder)]
        for holder in dead:
            self._fs.unlink_if_there(self._path / holder)
        return holders, dead

    def _holders(self) -> list[str]:
        try:
            return self._fs.listdir(self._path)
        except FileNotFoundError:
            return []

    def release(self) -> None:
        self._fs.remove_tree(self._path)


def sweep_claims(fs: FsOps, claims: Path, published: set[str], *, is_dead: Callable[[str], bool]) -> None:
    """Removes the claims that crashes left: those on `published` names (of parts, and of claims on chunks), and those
    of dead attempts that were never put into place."""
    published = {name.partition(".")[0] for name in published}
    for name in fs.listdir(claims):
        wanted, _, attempt = name.partition(".")
        if wanted in published if not attempt else is_dead(attempt):
            fs.remove_tree(claims / name)
