"""From one `--input` to paths: links are followed and loops end, names that tools hide are left out in the same way by
directories and globs, and what cannot be listed is an error."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterator

from batchjob.errors import InputDataError, InputMissingError, UsageError
from batchjob.inputs.formats.table import ENDINGS, is_data
from batchjob.inputs.left_out import LeftOut
from batchjob.inputs.names import base_name, is_hidden

_NOT_STORED = re.compile(r"/dev/(stdin|fd/.*)|/proc/[^/]+/fd/.*")


def expand(pattern: str) -> tuple[list[str], list[str]]:
    """The absolute paths behind a file, directory or glob, and warnings about what is left out. Paths that lead through
    linked folders come last; one file may come by several of them.

    Raises UsageError, InputMissingError (nothing there, or a folder that cannot be listed) and InputDataError (a pipe,
    a device).
    """
    if pattern == "-" or "://" in pattern:
        raise UsageError(f"--input {pattern}: only local files, directories and globs are read")
    path = os.path.abspath(os.path.expanduser(pattern))
    if _NOT_STORED.fullmatch(path):
        raise UsageError(
            f"--input {pattern}: only local files are read, and again when a job is resumed; write the rows to a file "
            "first"
        )
    walk = _Walk()
    if os.path.lexists(path) or not glob.has_magic(path):
        walk.take(path)
        if not walk.found and not walk.maybe:
            message = f"--input {pattern}: the directory holds no {', '.join(ENDINGS)} or .json file"
            raise InputMissingError("; ".join([message, *walk.said(pattern)]))
    else:
        walk.match("/", path.split("/")[1:])
        walk.take_folders()
        if not walk.found and not walk.maybe:
            raise InputMissingError("; ".join([f"--input {pattern}: no file matches", *walk.said(pattern)]))
    return walk.result(), walk.said(pattern)


def check_regular(path: str) -> os.stat_result:
    """Raises InputMissingError and InputDataError for what is no regular file, or cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError as error:
        target = f", a link to {os.readlink(path)}" if os.path.islink(path) else ""
        what = "no such file or directory" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise InputMissingError(f"cannot read {path}{target}: {what}") from error
    if not stat.S_ISREG(found.st_mode):
        raise InputDataError(
            f"{path} is {_sort_of(found.st_mode)}, not a file that can be read again when a job is resumed; write the "
            "rows to a file first"
        )
    return found


def _sort_of(mode: int) -> str:
    for test, name in ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a directory")):
        if test(mode):
            return name
    return "a device"


class _Walk:
    """Gathers the files behind one pattern. Each real folder is entered once, however many links lead to it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.maybe: list[str] = []  # .json: data where there is nothing else
        self._left_out = LeftOut()
        self._searched: set[str] = set()  # real paths of folders whose files are taken
        self._folders: list[str] = []  # that a glob has matched

    def result(self) -> list[str]:
        return list(dict.fromkeys(self.found or self.maybe))

    def said(self, pattern: str) -> list[str]:
        """Warnings. To be asked once, when all is found."""
        if self.found:
            for path in self.maybe:
                self._left_out.add_file(path)
            self.maybe.clear()
        return self._left_out.warnings(pattern)

    def take(self, path: str) -> None:
        """A file that was named, or all data files below a directory."""
        if os.path.isdir(path):
            for _, entries in _folders(path, self._searched, self._left_out):
                for entry in entries:
                    self._take_entry(entry)
        else:
            check_regular(path)
            self.found.append(path)

    def take_folders(self) -> None:
        """Takes what lies below the folders that a glob has matched, linked ones last."""
        for path in sorted(self._folders, key=lambda path: (os.path.islink(path), path)):
            self.take(path)

    def _hit(self, path: str) -> None:
        if os.path.isdir(path):
            self._folders.append(path)
        else:
            self.take(path)

    def _take_entry(self, entry: os.DirEntry[str]) -> None:
        name, path = entry.name, entry.path
        if _is_folder(entry):
            return  # `_folders` enters it
        if is_hidden(name):
            if is_data(name):
                self._left_out.add_hidden(path, is_folder=False)
        elif is_data(name):
            if not _is_file(entry):
                check_regular(path)
            self.found.append(path)
        elif not _is_file(entry):
            self._left_out.add_odd(path)
        elif base_name(name).endswith(".json"):
            self.maybe.append(path)
        else:
            self._left_out.add_file(path)

    def match(self, folder: str, parts: list[str]) -> None:
        """Takes what the parts of a glob match below a folder."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            while rest[:1] == ["**"]:
                rest = rest[1:]
            if not rest:
                self._hit(folder)
                return
            for inner, _ in _folders(folder, set(), self._left_out):
                self.match(inner, rest)
            return
        if not glob.has_magic(part):
            path = os.path.join(folder, part)
            if not os.path.lexists(path):
                return
            if not rest:
                self._hit(path)
            elif os.path.isdir(path):
                self.match(path, rest)
            return
        fits = re.compile(fnmatch.translate(part)).match
        for entry in _entries(folder):
            if not fits(entry.name):
                continue
            is_folder = _is_folder(entry)
            if is_hidden(entry.name) and part[0] != entry.name[0]:
                if is_folder or is_data(entry.name):
                    self._left_out.add_hidden(entry.path, is_folder=is_folder)
            elif rest and is_folder:
                self.match(entry.path, rest)
            elif not rest:
                self._hit(entry.path)


def _folders(root: str, entered: set[str], left_out: LeftOut) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """A folder and all below it with what they hold, those whose real path is in `entered` left out. Links come last,
    so that a folder is known by its own name where it has one below the root."""
    links = [root]
    while links:
        waiting = [links.pop(0)]
        while waiting:
            folder = waiting.pop()
            real = os.path.realpath(folder)
            if real in entered:
                continue
            entered.add(real)
            entries = _entries(folder)
            yield folder, entries
            for entry in reversed(entries):
                if not _is_folder(entry):
                    continue
                if is_hidden(entry.name):
                    left_out.add_hidden(entry.path, is_folder=True)
                elif entry.is_symlink():
                    links.append(entry.path)
                else:
                    waiting.append(entry.path)
        links.sort()


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted by name. Raises InputMissingError."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise InputMissingError(
            f"cannot list {folder}: {error.strerror or error}. The files below it would be left out: make it readable, "
            "or name the files to read"
        ) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Also for a link to one. A link that leads to itself is none, where DirEntry raises."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _is_file(entry: os.DirEntry[str]) -> bool:
    return os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file()
