"""From `--input` patterns to a list of files, each once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from stat import S_ISLNK

from batchjob.errors import InputDataError, InputMissingError, UsageError
from batchjob.inputs.answers import leave_out_answers
from batchjob.inputs.formats.base import FoundFile
from batchjob.inputs.formats.detect import detect
from batchjob.inputs.formats.table import FORMATS
from batchjob.inputs.walk import expand


def find_inputs(patterns: Sequence[str], output: str | None = None) -> tuple[list[FoundFile], list[str]]:
    """The files behind files, directories and globs, and warnings. Patterns keep their order, files are sorted by name.

    A directory is searched in depth for .jsonl, .ndjson and .parquet files (and packed ones), and for .json ones where
    there are no others; names that begin with a dot or an underscore are left out. A file that is named or linked twice
    counts once. What lies in `output`, and answers of other jobs that no pattern names, is left out. Raises
    InputMissingError (nothing there), InputDataError (not a format we read), UsageError.
    """
    if not patterns:
        raise UsageError("no input given: --input FILE, directory or glob")
    known = _Known()
    warnings: list[str] = []
    for pattern in patterns:
        paths, said = expand(pattern)
        kept, left_out = leave_out_answers(pattern, paths, output)
        warnings += [*said, *left_out]
        known.add(kept)
    files = [detect(path) for path in known.paths]
    formats = {file.format for file in files}
    if len(formats) > 1:
        examples = {file.format: file.path for file in reversed(files)}
        mixed = " and ".join(
            f"{format.title} ({examples[name]})" for name, format in FORMATS.items() if name in formats
        )
        raise InputDataError(f"the inputs mix {mixed}; run one job for each")
    return files, [*warnings, *known.warnings()]


class _Known:
    """Files that have been named, by what they are: of several names of one file the first counts."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._by_place: dict[str | tuple[int, int], str] = {}
        self._folders: dict[str, str] = {}  # as named -> as it is
        self._again: list[str] = []

    def add(self, paths: Sequence[str]) -> None:
        """Those of one pattern, which are then sorted by name."""
        new: dict[str, None] = {}
        for path in paths:
            places = self._places(path)
            known = next((self._by_place[place] for place in places if place in self._by_place), None)
            if known is None:
                self._by_place.update(dict.fromkeys(places, path))
                new[path] = None
            elif known == path:
                self._again.append(f"{path} is named by two --input patterns and read once")
            elif known not in new or len(places) > 1 or os.path.islink(path):  # else its folder is linked twice
                self._again.append(f"{path} is the same file as {known} and read once")
        self.paths += sorted(new)

    def _places(self, path: str) -> list[str | tuple[int, int]]:
        folder, name = os.path.split(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        try:
            stat = os.lstat(path)
            if S_ISLNK(stat.st_mode):
                stat = os.stat(path)
                real = os.path.realpath(path)
            else:
                real = os.path.join(self._folders[folder], name)
        except OSError as error:
            raise InputMissingError(f"cannot read {path}: {error.strerror or error}") from error
        return [real] if stat.st_nlink < 2 else [real, (stat.st_dev, stat.st_ino)]

    def warnings(self) -> list[str]:
        first = list(dict.fromkeys(self._again))
        more = f" (and {len(first) - 1:,} more files like it)" if len(first) > 1 else ""
        return [first[0] + more] if first else []
