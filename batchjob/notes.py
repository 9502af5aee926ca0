"""Small files beside a job's state that nothing depends on: stacks of a hung worker, counts of fruitless requeues.

Another user with the right to write to the output directory may plant links, pipes or directories under their names, so
no link is followed and no read waits.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_NOTE = 4096  # bytes that are read


def write_note(path: Path, text: str) -> None:
    """Writes a file, whole or not at all. Makes the last directory. Raises OSError, ELOOP or ENOTDIR for a
    link in the last two directories; a link that has the name itself is replaced, not followed."""
    with _directory(path.parent, make=True) as folder:
        via = f"{path.name}.{os.getpid()}"
        with suppress(FileNotFoundError):
            os.unlink(via, dir_fd=folder)
        fd = os.open(via, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.rename(via, path.name, src_dir_fd=folder, dst_dir_fd=folder)


def read_note(path: Path) -> str:
    """Reads a file. Raises OSError where it is no regular file, and ValueError if it is no text."""
    with _directory(path.parent, make=False) as folder:
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file", str(path))
            return os.read(fd, _MAX_NOTE).decode()
        finally:
            os.close(fd)


@contextmanager
def _directory(path: Path, *, make: bool) -> Iterator[int]:
    outer = os.open(path.parent, _DIRECTORY)
    try:
        if make:
            with suppress(FileExistsError):
                os.mkdir(path.name, dir_fd=outer)
        inner = os.open(path.name, _DIRECTORY, dir_fd=outer)
    finally:
        os.close(outer)
    try:
        yield inner
    finally:
        os.close(inner)
