"""Finds keys that come more than once, however many there are: in memory first, then through temporary files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO
from zlib import crc32

from batchjob.errors import StorageError

MAX_EXAMPLES = 5


class DuplicateFinder:
    """Finds keys that come more than once, exactly, in bounded memory.

    Up to `in_memory` keys are held; then all go to 64 temporary files by checksum, read back one at a time. A key is
    JSON text, so that 7 and "7" do not meet.
    """

    def __init__(self, *, in_memory: int = 200_000, num_files: int = 64) -> None:
        self._in_memory, self._num_files = in_memory, num_files
        self._keys: list[tuple[str, str]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: list[IO[str]] = []

    def __enter__(self) -> DuplicateFinder:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, key: str, where: str) -> None:
        self._keys.append((key, where))
        if len(self._keys) >= self._in_memory:
            self._spill()

    def _spill(self) -> None:
        if self._folder is None:
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="batchjob-ids-")
            except OSError as error:
                raise StorageError(
                    f"there is no place for temporary files, which so many ids need ({error.strerror or error}). Set "
                    "TMPDIR to a directory that can be written to"
                ) from error
            names = [Path(self._folder.name) / str(index) for index in range(self._num_files)]
            self._files = [name.open("w+", encoding="utf-8") for name in names]
        for key, where in self._keys:
            file = self._files[crc32(key.encode()) % self._num_files]
            file.write(json.dumps([key, where]) + "\n")
        self._keys.clear()

    def result(self) -> tuple[int, list[dict[str, str]]]:
        """Rows whose key an earlier row has, and the first few of them: {"id", "first", "again"}."""
        if self._folder is None:
            return _duplicates(self._keys)
        self._spill()
        total = 0
        examples: list[dict[str, str]] = []
        for file in self._files:
            file.seek(0)
            count, some = _duplicates(tuple(json.loads(line)) for line in file)
            total += count
            examples += some
        return total, examples[:MAX_EXAMPLES]


def _duplicates(keys: Iterable[tuple[str, ...]]) -> tuple[int, list[dict[str, str]]]:
    first: dict[str, str] = {}
    count = 0
    examples: list[dict[str, str]] = []
    for key, where in keys:
        seen = first.setdefault(key, where)
        if seen is not where:
            count += 1
            if len(examples) < MAX_EXAMPLES:
                shown = key if len(key) <= 80 else key[:80] + "..."
                examples.append({"id": shown, "first": seen, "again": where})
    return count, examples
