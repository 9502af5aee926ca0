"""The errors that a user sees when a file operation fails: the operation, the place, and the remedy."""

from __future__ import annotations

import errno
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchjob.errors import DiskFullError, FileServerError, OutputCreateError, StorageError

# What a mount answers whose server or FUSE process is gone.
_SERVER_GONE = (
    errno.ENOTCONN,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
    errno.ESHUTDOWN,
)
_PERMISSIONS = "Check its permissions"


def storage_error(error: OSError, action: str, path: Path) -> StorageError:
    """The error that the user sees: what failed, where, and what to do."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return DiskFullError(
            f"{what}: {action} {path} failed ({reason}; {_free_space(path)}). Make room and run the same command "
            "again; finished rows are kept."
        )
    if error.errno == errno.ELOOP:
        return StorageError(f"{action} {path} failed: it is a symbolic link, which batchjob does not follow there.")
    if error.errno == errno.ESTALE:
        return FileServerError(
            f"{action} {path} failed ({reason}): the file server lost track of it, as after a restart or a new "
            "mount. Run the same command again; finished rows are kept."
        )
    if error.errno in _SERVER_GONE:
        return FileServerError(
            f"{action} {path} failed ({reason}): the file server does not answer, or its mount has gone. See `df "
            f"{_quoted(path.parent)}`; once it is back, run the same command again; finished rows are kept."
        )
    if error.errno == errno.EROFS:
        return StorageError(
            f"{action} {path} failed ({reason}): the file system is mounted read-only. If it was writable before, the "
            "kernel has remounted it after a disk error (see `dmesg`) or a user did (see `findmnt --target "
            f"{_quoted(path.parent)}`). Once it is writable again, run the same command again; finished rows are kept."
        )
    if error.errno == errno.EXDEV:
        return StorageError(
            f"{action} {path} failed ({reason}): OUT/data and OUT/.batchjob must be on one file system, neither a "
            "mount of its own. Put them there and run the same command again; finished rows are kept."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return StorageError(f"{action} {path} failed ({reason}). Check the permissions and run the same command again.")
    if error.errno == errno.ENOENT:
        return StorageError(
            f"{action} {path} failed ({reason}). Was the output directory moved or deleted during the run? Put it back "
            "and run the same command again."
        )
    return StorageError(
        f"{action} {path} failed ({reason}). Check the disk or file server and run the same command again; finished "
        "rows are kept."
    )


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Turns OSError into StorageError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, action, path) from error


@contextmanager
def create_errors(path: Path) -> Iterator[None]:
    """Turns OSError into OutputCreateError while an output directory is set up (a full disk stays StorageError)."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, *_SERVER_GONE):
            raise storage_error(error, "setting up", path) from error
        if error.errno == errno.ELOOP:
            raise storage_error(error, "using", Path(error.filename or path)) from error
        cause = "Its file system is mounted read-only: see `findmnt`" if error.errno == errno.EROFS else _PERMISSIONS
        raise OutputCreateError(
            f"the output directory {path} cannot be set up ({error.strerror or error}"
            f"{f': {error.filename}' if error.filename else ''}). {cause}, or choose another --output."
        ) from error


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _free_space(path: Path) -> str:
    for place in (path, *path.parents):
        try:
            return f"{shutil.disk_usage(place).free / 2**20:,.0f} MiB free"
        except OSError:
            continue
    return "free space unknown"
