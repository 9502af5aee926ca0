"""Directories held open, so that operations below them stay in them.

A path names the file that lies there at the moment. Once a directory is anchored, operations on paths below it use
its descriptor: if it is deleted and another job makes a directory of the same name, even with the same inode
number, they fail (ENOENT) or stay in the one that was opened, and never get into the new one. Below an anchor no
symbolic link is followed: a link that another user has put there leads no write and no removal to another place
(ELOOP).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Anchor:
    """One open directory. Its descriptor lives as long as this object, which every operation in progress holds."""

    def __init__(self, path: Path, *, follow: bool) -> None:
        """`follow`: the directory itself may be a symbolic link. Raises OSError."""
        self.path = path
        self.fd = -1
        self.fd = os.open(path, _DIRECTORY | (0 if follow else os.O_NOFOLLOW))

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    @contextmanager
    def parent_of(self, path: Path) -> Iterator[tuple[int, str]]:
        """The descriptor of the directory that `path`, at or below the anchor, is in, and its name there."""
        *folders, name = path.relative_to(self.path).parts or (".",)
        fd, opened = self.fd, -1
        try:
            for folder in folders:
                fd = _open_directory(folder, fd)
                if opened >= 0:
                    os.close(opened)
                opened = fd
            yield fd, name
        finally:
            if opened >= 0:
                os.close(opened)


class Anchors:
    """The anchors of an output, by path. The longest one that a path begins with counts."""

    def __init__(self) -> None:
        self._anchors: dict[Path, Anchor] = {}

    def add(self, path: Path, *, follow: bool) -> None:
        """Anchors a directory, or anchors it again. Raises OSError."""
        self._anchors[path] = Anchor(path, follow=follow)

    def clear(self) -> None:
        """Closes all descriptors; one that an operation in progress uses stays open until that is over."""
        self._anchors = {}

    def find(self, path: Path) -> Anchor | None:
        if self._anchors:
            for place in (path, *path.parents):
                if (found := self._anchors.get(place)) is not None:
                    return found
        return None

    @contextmanager
    def parent_of(self, path: Path) -> Iterator[tuple[int | None, str]]:
        """As `Anchor.parent_of`; None and the whole path where no anchor is above it."""
        anchor = self.find(path)
        if anchor is None:
            yield None, str(path)
        else:
            with anchor.parent_of(path) as (fd, name):
                yield fd, name


def open_listed(name: str, fd: int | None) -> int:
    """Opens a directory to list or to sync it; not by way of a link where `fd` is a directory of an anchor."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if fd is None:
        return os.open(name, flags)
    return _refusing_links(name, fd, flags)


def _open_directory(name: str, fd: int) -> int:
    return _refusing_links(name, fd, _DIRECTORY)


def _refusing_links(name: str, fd: int, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise
