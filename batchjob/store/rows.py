"""The finished rows of an open chunk: in memory up to a budget, past it as places in the chunk's logs."""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import partial
from pathlib import Path
from typing import Any

from batchjob.errors import StorageError
from batchjob.plan import Chunk
from batchjob.store.context import MemoryBudget
from batchjob.store.fsops import FsOps
from batchjob.store.reread import reread
from batchjob.store.wal import HEADER_LEN, parse_payloads, unframe

Records = list[dict[str, Any]]  # log records of consecutive (row, sample) pairs, in order

MAX_SAMPLES = 1 << 24  # of a row
_SAMPLE_BITS = 24
_LEN_BITS = 40
_LEN_MASK = (1 << _LEN_BITS) - 1
_OFFSET_BITS = 48
# Rows of one group, which becomes a row group of the part: bounds the memory of a commit whatever the outputs' length.
_GROUP_ROWS = 4_000  # as Python objects at a time; a row group of the part
_GROUP_BYTES = 16 * 2**20


class FinishedRows(Set[tuple[int, int]]):
    """The (row_index, sample_index) pairs that are finished, as a set, with their log payloads.

    A row is bound to a number of samples: the job's, unless `expect` says otherwise. Rows inside are counted from the
    chunk's first; a key is such a row and a sample in one integer, a value its payload or place (log, offset, size).
    """

    def __init__(self, fs: FsOps, chunk: Chunk, num_samples: int, memory: MemoryBudget) -> None:
        self.num_expected = chunk.num_rows * num_samples
        self.logs: list[Path] = []  # that places point into
        self._fs = fs
        self._first = chunk.row_index
        self._num_rows = chunk.num_rows
        self._default = num_samples
        self._num_samples: dict[int, int] = {}  # by row, where it is not the default
        self._entries: dict[int, bytes | int] = {}
        self._memory = memory
        self._held = 0  # bytes of the budget

    # -- as a set

    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return frozenset(it)

    def __contains__(self, pair: object) -> bool:
        if not isinstance(pair, tuple):
            return False
        row_index, sample_index = pair
        return (row_index - self._first) << _SAMPLE_BITS | sample_index in self._entries

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self._first + (key >> _SAMPLE_BITS), key & (MAX_SAMPLES - 1)) for key in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    # -- samples of a row

    def num_samples(self, row_index: int) -> int:
        """The number of samples of a row; 0 if it is not one of the chunk."""
        row = row_index - self._first
        return self._num_samples.get(row, self._default) if 0 <= row < self._num_rows else 0

    def bound_to(self, row_index: int) -> int | None:
        """The number of samples that a row is bound to; None if it has no finished sample and no number was set."""
        row = row_index - self._first
        known = self._num_samples.get(row)
        if known is None and any((row << _SAMPLE_BITS | sample) in self._entries for sample in range(self._default)):
            return self._default
        return known

    def expect(self, row_index: int, num_samples: int) -> None:
        known = self.num_samples(row_index)
        if known != num_samples:
            if known == 0 or not 0 < num_samples < MAX_SAMPLES:
                raise ValueError(f"row {row_index} cannot have {num_samples} samples here")
            self._num_samples[row_index - self._first] = num_samples
            self.num_expected += num_samples - known

    def complete_rows(self) -> set[int]:
        """The rows of which every sample is finished."""
        number: dict[int, int] = {}
        for key in self._entries:
            row = key >> _SAMPLE_BITS
            number[row] = number.get(row, 0) + 1
        return {self._first + row for row, have in number.items() if have == self._num_samples.get(row, self._default)}

    # -- payloads

    def put(self, row_index: int, sample_index: int, payload: bytes, log: int, offset: int) -> None:
        """Notes a finished sample, whose record is in log number `log` at `offset`."""
        size = len(payload)
        if self._memory.take(size):
            self._held += size
            entry: bytes | int = payload
        else:
            entry = _pack(log, offset, size)
        self._entries[(row_index - self._first) << _SAMPLE_BITS | sample_index] = entry

    def moved(self, key: int, payload: bytes, log: int, offset: int) -> None:
        """Notes that a record has been written to another place."""
        if isinstance(self._entries[key], int):
            self._entries[key] = _pack(log, offset, len(payload))

    def groups(self) -> Iterator[list[tuple[int, bytes]]]:
        """Keys and payloads in order, in groups of bounded number and size. Raises StorageError, or OSError."""
        group: list[int] = []
        size = 0
        for key in sorted(self._entries):
            entry = self._entries[key]
            group.append(key)
            size += len(entry) if isinstance(entry, bytes) else entry & _LEN_MASK
            if len(group) == _GROUP_ROWS or size >= _GROUP_BYTES:
                yield self._read_payloads(group)
                group, size = [], 0
        if group:
            yield self._read_payloads(group)

    def batches(self) -> Iterator[Records]:
        """The records in order, group by group. Raises StorageError, or OSError."""
        for group in self.groups():
            records = []
            for (key, _), record in zip(group, parse_payloads([payload for _, payload in group]), strict=True):
                if record is None or (record["row"] - self._first) << _SAMPLE_BITS | record["sample"] != key:
                    raise StorageError("a log record is not the one that was written; run the same command again")
                records.append(record)
            yield records

    def _read_payloads(self, keys: list[int]) -> list[tuple[int, bytes]]:
        """The payloads of keys; those that are not in memory are read from the logs, in the order of their offsets."""
        found: dict[int, bytes] = {}
        outside: dict[int, list[tuple[int, int, int]]] = {}
        for key in keys:
            entry = self._entries[key]
            if isinstance(entry, bytes):
                found[key] = entry
            else:
                log, offset, size = _unpack(entry)
                outside.setdefault(log, []).append((offset, size, key))
        for log, places in outside.items():
            found.update(reread(partial(self._read_places, self.logs[log], sorted(places))))
        return [(key, found[key]) for key in keys]

    def _read_places(self, path: Path, places: list[tuple[int, int, int]]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        with self._fs.open_read(path) as file:
            for offset, size, key in places:
                file.seek(offset)
                payload = unframe(file.read(HEADER_LEN + size))
                if payload is None or len(payload) != size:
                    raise StorageError(
                        f"{path} has changed or is damaged at byte {offset}. Run the same command again: the row is "
                        "computed again."
                    )
                found[key] = payload
        return found

    def release(self) -> None:
        """Gives the memory budget back."""
        self._memory.give_back(self._held)
        self._held = 0


def _pack(file_number: int, offset: int, size: int) -> int:
    return (file_number << _OFFSET_BITS | offset) << _LEN_BITS | size


def _unpack(place: int) -> tuple[int, int, int]:
    rest, size = place >> _LEN_BITS, place & _LEN_MASK
    return rest >> _OFFSET_BITS, rest & ((1 << _OFFSET_BITS) - 1), size
