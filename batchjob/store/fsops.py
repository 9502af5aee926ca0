"""`FsOps`: every file operation of the store, as one object.

Nothing else in `store` touches the file system, so a test that replaces this object can fail or crash the k-th
operation for every k. The first group of methods are single operations and raise OSError; the second are made of them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from batchjob.store.anchors import Anchors, open_listed
from batchjob.store.reread import reread

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_DRAIN_BYTES = 1 << 20

# What a directory fsync answers where the file system has no such thing; its directories are then durable or not
# without our doing.
_NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOTSUP)


class FsOps:
    """The real file system. Paths are absolute; files are created with O_EXCL only, never opened for truncation.

    `owners` are the users whose files are read; None for those of all users.
    """

    owners: frozenset[int] | None = None

    @cached_property
    def _anchors(self) -> Anchors:
        return Anchors()

    def anchor(self, path: Path, *, follow: bool = False) -> None:
        """Anchors a directory: paths at or below it stay in it from now on, wherever it is moved; see `anchors`.

        `follow`: the directory itself may be a symbolic link. Raises OSError.
        """
        self._anchors.add(path, follow=follow)

    def release_anchors(self) -> None:
        """Drops all anchors: paths name again the files that lie there at the moment."""
        self._anchors.clear()

    def create(self, path: Path) -> int:
        """Creates a file for appending and returns its descriptor; FileExistsError if the name is taken."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._anchors.parent_of(path) as (fd, name):
            return os.open(name, flags, 0o666, dir_fd=fd)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def link(self, source: Path, target: Path) -> None:
        """Gives a file a second name; FileExistsError if that is taken. Atomic."""
        with self._anchors.parent_of(source) as (from_fd, old), self._anchors.parent_of(target) as (to_fd, new):
            os.link(old, new, src_dir_fd=from_fd, dst_dir_fd=to_fd)

    def rename(self, source: Path, target: Path) -> None:
        """Replaces a file that is there; a directory is replaced only if it is empty. Atomic."""
        with self._anchors.parent_of(source) as (from_fd, old), self._anchors.parent_of(target) as (to_fd, new):
            os.rename(old, new, src_dir_fd=from_fd, dst_dir_fd=to_fd)

    def rename_noreplace(self, source: Path, target: Path) -> None:
        """Renames, or raises FileExistsError; OSError(ENOSYS or EINVAL) where kernel or file system cannot."""
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
        with self._anchors.parent_of(source) as (from_fd, old), self._anchors.parent_of(target) as (to_fd, new):
            here, there = (_AT_FDCWD if fd is None else fd for fd in (from_fd, to_fd))
            if call(here, os.fsencode(old), there, os.fsencode(new), _RENAME_NOREPLACE) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(target))

    def unlink(self, path: Path) -> None:
        with self._anchors.parent_of(path) as (fd, name):
            os.unlink(name, dir_fd=fd)

    def mkdir(self, path: Path) -> None:
        with self._anchors.parent_of(path) as (fd, name):
            os.mkdir(name, dir_fd=fd)

    def rmdir(self, path: Path) -> None:
        with self._anchors.parent_of(path) as (fd, name):
            os.rmdir(name, dir_fd=fd)

    def fsync_dir(self, path: Path) -> None:
        """Makes the names in a directory durable."""
        with self._anchors.parent_of(path) as (parent, name):
            fd = open_listed(name, parent)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_FSYNC:
                raise
        finally:
            os.close(fd)

    def listdir(self, path: Path) -> list[str]:
        with self._anchors.parent_of(path) as (parent, name):
            fd = open_listed(name, parent)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def stat(self, path: Path) -> os.stat_result:
        """The status of a file: below an anchor that of a link itself, elsewhere that of its target."""
        with self._anchors.parent_of(path) as (fd, name):
            return os.stat(name, dir_fd=fd, follow_symlinks=fd is None)

    def access(self, path: Path) -> bool:
        """True if this process may write into a directory."""
        with self._anchors.parent_of(path) as (fd, name):
            return os.access(name, os.W_OK | os.X_OK, dir_fd=fd)

    def open_read(self, path: Path) -> BinaryIO:
        """Opens a regular file. A symbolic link is refused (ELOOP), for the store makes none. So is a pipe or a device
        (EINVAL), on which a read could wait for ever, and a file of a user who is not one of `owners` (EPERM)."""
        with self._anchors.parent_of(path) as (parent, name):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if self.owners is not None and status.st_uid not in self.owners:
            os.close(fd)
            whose = f"it belongs to another user, uid {status.st_uid}; BATCHJOB_TRUST_OUTPUT=1 trusts all"
            raise OSError(errno.EPERM, whose, str(path))
        return os.fdopen(fd, "rb")

    # -- made of the above

    def write_all(self, fd: int, data: bytes | memoryview) -> None:
        """Writes everything: a write may be short, and the rest then follows."""
        view = memoryview(data)
        while view:
            view = view[self.write(fd, view) :]

    def write_file(self, path: Path, data: bytes) -> None:
        """A new file with this content, on disk when the call returns; its name is not durable yet."""
        fd = self.create(path)
        try:
            self.write_all(fd, data)
            self.fsync(fd)
        finally:
            self.close(fd)

    def replace_file(self, path: Path, data: bytes, *, via: Path) -> None:
        """Puts new content under a name that may be taken, by way of the unused name `via`."""
        self.write_file(via, data)
        self.rename(via, path)
        self.fsync_dir(path.parent)

    def read_file(self, path: Path) -> bytes:
        def read() -> bytes:
            with self.open_read(path) as file:
                return file.read()

        return reread(read)

    def exists(self, path: Path) -> bool:
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def is_link(self, path: Path) -> bool:
        with self._anchors.parent_of(path) as (fd, name):
            return stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)

    def ensure_dir(self, path: Path) -> None:
        """Makes one directory, if it is not there, and its name durable (its maker may have died before that)."""
        try:
            self.mkdir(path)
        except FileExistsError:
            if not stat.S_ISDIR(self.stat(path).st_mode):
                raise
        self.fsync_dir(path.parent)

    def ensure_dirs(self, path: Path) -> None:
        """Makes a directory with all its parents."""
        if not self.exists(path):
            if path.parent != path:
                self.ensure_dirs(path.parent)
            self.ensure_dir(path)

    def remove_tree(self, path: Path) -> None:
        """Removes a directory with its content, or another file of that name; of a link, the link itself.

        A file that another process removes meanwhile is no error.
        """
        try:
            if path != path.parent and self.is_link(path):
                raise NotADirectoryError
            names = self.listdir(path)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            try:
                self.unlink_if_there(path)
            except OSError as error:
                if error.errno != errno.EBUSY:  # NFS: removed already, but still open somewhere
                    raise
            return
        for name in names:
            self.remove_tree(path / name)
        try:
            self.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def unlink_if_there(self, path: Path) -> None:
        try:
            self.unlink(path)
        except FileNotFoundError:
            return


class Sink:
    """A file object for pyarrow that writes through an FsOps. `finish` fsyncs; `abandon` closes without an error.

    Small writes are joined. After `abandon` writes are swallowed: a Parquet writer that dies by an exception still
    writes its footer when it is collected, and must not touch a descriptor that may be another file's by then.
    """

    def __init__(self, fs: FsOps, path: Path) -> None:
        self._fs = fs
        self._fd = fs.create(path)
        self._pending = bytearray()
        self._size = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        if not self.closed:
            self._pending += data
            self._size += len(data)
            if len(self._pending) >= _DRAIN_BYTES:
                self._drain()
        return len(data)

    def _drain(self) -> None:
        pending, self._pending = self._pending, bytearray()
        self._fs.write_all(self._fd, bytes(pending))

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Does nothing: `finish` makes the file durable."""

    def close(self) -> None:
        """Does nothing: pyarrow closes at odd times; `finish` and `abandon` close the file."""

    def finish(self) -> int:
        """Writes what is left, fsyncs, closes, and returns the size in bytes. Raises OSError; abandon it then."""
        self._drain()
        self._fs.fsync(self._fd)
        self.closed = True
        self._fs.close(self._fd)
        return self._size

    def abandon(self) -> None:
        if not self.closed:
            self.closed = True
            with suppress(OSError):  # the file is garbage, whatever its file system says of it once more
                self._fs.close(self._fd)
