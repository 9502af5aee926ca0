"""Files below an input that are not read: counted by kind, and reported in one line with an example and a remedy."""

from __future__ import annotations

import os
import re
from collections import Counter

from batchjob.inputs.names import PACKED_NAMES

_MAX_KINDS = 5
_ENDING = re.compile(r"\.[A-Za-z0-9_]{1,12}")
_TABLES = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}
# Folders of tools that hold no data.
_KNOWN_FOLDERS = {".git", ".cache", ".batchjob", ".ipynb_checkpoints", "__pycache__", "__MACOSX", "_spark_metadata"}


class LeftOut:
    """Counts what a walk passes over."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._tables: dict[str, str] = {}  # folder -> format
        self._hidden: set[str] = set()  # a glob may come by twice

    def add_file(self, path: str) -> None:
        """A file whose name is not that of an input."""
        self._add(_kind(os.path.basename(path)), path)

    def add_hidden(self, path: str, *, is_folder: bool) -> None:
        """Something whose name begins with a dot or an underscore."""
        if path in self._hidden:
            return
        self._hidden.add(path)
        folder, name = os.path.split(path)
        if name in _TABLES:
            self._tables.setdefault(folder, _TABLES[name])
        elif name not in _KNOWN_FOLDERS:
            self._add("hidden folder" if is_folder else "hidden data file", path)

    def add_odd(self, path: str) -> None:
        """A pipe, a socket, a device, or a link that leads nowhere."""
        self._add("no regular file", path)

    def _add(self, kind: str, path: str) -> None:
        self._counts[kind] += 1
        self._examples.setdefault(kind, path)

    def warnings(self, pattern: str) -> list[str]:
        """The lines for a person; none if nothing was left out."""
        found = [
            f"{folder} is a {table} table, whose log is not read: rows that it has deleted or replaced are read as well"
            for folder, table in self._tables.items()
        ]
        if self._counts:
            kinds = self._counts.most_common()
            shown = [f"{count:,} {kind} ({self._examples[kind]})" for kind, count in kinds[:_MAX_KINDS]]
            if rest := sum(count for _, count in kinds[_MAX_KINDS:]):
                shown.append(f"{rest:,} of other kinds")
            number = sum(self._counts.values())
            found.append(
                f"--input {pattern}: {number:,} {'is' if number == 1 else 'are'} left out: {', '.join(shown)}. To read "
                "one that holds prompts, name it with --input, or convert it to .jsonl or .parquet"
            )
        return found


def _kind(name: str) -> str:
    """The ending of a name, with that of a compression behind it."""
    stem, ending = os.path.splitext(name.lower())
    if ending in PACKED_NAMES:
        ending = os.path.splitext(stem)[1] + ending if _ENDING.fullmatch(os.path.splitext(stem)[1]) else ending
        return ending
    return ending if _ENDING.fullmatch(ending) else "without a known ending"
