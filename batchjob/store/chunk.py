"""One chunk in work: its finished rows, its log, and the commit that turns them into a part."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchjob.errors import InputMissingError, StorageError
from batchjob.plan import Chunk
from batchjob.records import Completion
from batchjob.store.commit import Committed, Records, commit_chunk, settle, winner_of
from batchjob.store.context import StoreContext
from batchjob.store.counts import Counts
from batchjob.store.fsops import storage_error, storage_errors
from batchjob.store.wal import HEADER_LEN, ChunkLog, LogScan, encode_record, frame, parse_payloads, unframe

_SAMPLE_BITS = 24
_LEN_BITS = 40
_LEN_MASK = (1 << _LEN_BITS) - 1
_OFFSET_BITS = 48
_PARSE_ROWS = 2_000
# Rows of one row group of a part: bounds the memory of a commit whatever the length of the outputs.
_GROUP_ROWS = 20_000
_GROUP_BYTES = 16 * 2**20


class FinishedKeys(Set[tuple[int, int]]):
    """The (row_index, sample_index) pairs that are finished: a live view."""

    def __init__(self, entries: dict[int, bytes | int], first_row: int) -> None:
        self._entries = entries
        self._first_row = first_row

    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return frozenset(it)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple):
            return False
        row, sample = key
        return (row - self._first_row) << _SAMPLE_BITS | sample in self._entries

    def __iter__(self) -> Iterator[tuple[int, int]]:
        mask = (1 << _SAMPLE_BITS) - 1
        return ((self._first_row + (key >> _SAMPLE_BITS), key & mask) for key in self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class OpenChunk:
    """A chunk that this process works on. `Store.open_chunk` makes it; `commit` or `close` ends it.

    `finished` are the keys of finished rows, those of earlier attempts included; `counts` counts them; `num_replayed`
    is how many came out of logs. There, `num_bad` damaged records were passed over, and `num_torn` that a kill cut off.
    """

    def __init__(
        self, context: StoreContext, chunk: Chunk, *, on_commit: Callable[[Committed], None] | None = None
    ) -> None:
        self.chunk = chunk
        self.counts = Counts()
        self.num_replayed = 0
        self.num_bad = 0
        self.num_torn = 0
        self.closed = False
        self._context = context
        self._fs = context.fs
        self._on_commit = on_commit
        self._memory = context.memory
        self._held = 0  # bytes of the budget
        self._default = context.manifest.num_samples
        self._num_samples: dict[int, int] = {}  # by row within the chunk, where it is not the default
        self._num_expected = chunk.num_rows * self._default
        self._first = chunk.row_index
        self._num_rows = chunk.num_rows
        self._with_token_ids = context.manifest.output_token_ids
        self._wal = context.layout.chunk_wal(chunk.index)
        self._log = ChunkLog(self._fs, self._wal, context.attempt)
        self._files: list[Path] = []  # logs that entries point into
        self._log_number = -1  # that of our own log
        # Key: row within the chunk and sample. Value: the payload, or where it is (file number, offset, length).
        self._entries: dict[int, bytes | int] = {}
        self.finished = FinishedKeys(self._entries, self._first)
        self._replay()

    # -- what is finished

    def expect(self, row_index: int, num_samples: int) -> None:
        """Says how many samples a row has, where its own params ask for other than the job's `n`. Before its `add`."""
        row = row_index - self._first
        known = self._known_samples(row)
        if known is not None and known != num_samples:
            raise InputMissingError(
                f"row {row_index} asks for {num_samples} samples, an earlier run for {known}: its input has changed"
            )
        self._expect(row, num_samples)

    def _known_samples(self, row: int) -> int | None:
        """The number of samples that a row is bound to; None if nothing has been said or finished of it."""
        known = self._num_samples.get(row)
        if known is None and any((row << _SAMPLE_BITS | sample) in self._entries for sample in range(self._default)):
            return self._default
        return known

    def _expect(self, row: int, num_samples: int) -> None:
        known = self._num_samples.get(row, self._default)
        if known != num_samples:
            if not 0 < num_samples < 1 << _SAMPLE_BITS:
                raise ValueError(f"a row cannot have {num_samples} samples")
            self._num_samples[row] = num_samples
            self._num_expected += num_samples - known

    def row_is_complete(self, row_index: int) -> bool:
        """Whether all samples of a row are finished."""
        row = row_index - self._first
        n = self._num_samples.get(row, self._default)
        return all((row << _SAMPLE_BITS | sample) in self._entries for sample in range(n))

    def complete_rows(self) -> set[int]:
        """The rows of which every sample is finished: those that need not be read again."""
        number: dict[int, int] = {}
        for key in self._entries:
            row = key >> _SAMPLE_BITS
            number[row] = number.get(row, 0) + 1
        return {self._first + row for row, have in number.items() if have == self._num_samples.get(row, self._default)}

    def is_complete(self) -> bool:
        """Whether every sample of every row is finished, so that the chunk can be committed."""
        return len(self._entries) == self._num_expected

    def add(self, completion: Completion) -> bool:
        """Writes a finished sample to the log at once; a kill cannot take it any more. False if it is there already.

        Raises StorageError when two files in a row could not be written; nothing is noted then, so the caller may try
        again with the same completion.
        """
        row, sample = completion.row_index - self._first, completion.sample_index
        n = self._num_samples.get(row, self._default)
        if not (0 <= row < self._num_rows and 0 <= sample < n):
            raise ValueError(f"sample {sample} of row {completion.row_index} is not one of chunk {self.chunk.index}")
        key = row << _SAMPLE_BITS | sample
        if key in self._entries:
            return False
        payload = encode_record(completion, n, with_token_ids=self._with_token_ids)
        offset = self._append(frame(payload))
        self._keep(key, payload, self._log_number, offset)
        error = completion.error
        self.counts.add_row(
            None if error is None else error.type, completion.num_prompt_tokens, len(completion.token_ids)
        )
        return True

    def _append(self, record: bytes) -> int:
        log = self._log
        try:
            offset = log.append(record)
        except OSError:
            log.abandon()  # its tail is unknown now: a new file
            try:
                offset = log.append(record)
            except OSError as error:
                path = log.path or self._wal
                log.abandon()
                raise storage_error(error, "writing", path) from error
        if offset == 0 and log.path is not None:
            self._log_number = len(self._files)
            self._files.append(log.path)
        return offset

    def _keep(self, key: int, payload: bytes, file_number: int, offset: int) -> None:
        size = len(payload)
        if self._memory.take(size):
            self._held += size
            self._entries[key] = payload
        else:
            self._entries[key] = _pack(file_number, offset, size)

    def sync(self) -> None:
        """fdatasync of the log, if anything was written since the last. Raises StorageError."""
        log = self._log
        if not log.lost:
            try:
                log.sync()
                return
            except OSError:
                log.abandon()
        # What a file holds after a failed write or fsync is unknown, and asking again proves nothing: a new file.
        written = False
        try:
            log.lost = False
            self._rewrite()
            log.sync()
            written = not log.lost
        except OSError as error:
            raise storage_error(error, "writing", log.path or self._wal) from error
        finally:
            if not written:
                log.abandon()
                log.lost = True
        if not written:
            raise storage_error(OSError(errno.EIO, os.strerror(errno.EIO)), "writing", log.path or self._wal)

    def _rewrite(self) -> None:
        for keys in self._groups():
            for key, payload in zip(keys, self._payloads(keys), strict=True):
                offset = self._append(frame(payload))
                if isinstance(self._entries[key], int):
                    self._entries[key] = _pack(self._log_number, offset, len(payload))

    # -- the log of earlier attempts

    def _replay(self) -> None:
        try:
            names = sorted(self._fs.listdir(self._wal))
        except FileNotFoundError:
            return
        for name in names:
            number = len(self._files)
            try:
                with self._fs.open_read(self._wal / name) as file:
                    self._files.append(self._wal / name)
                    scan = LogScan(file)
                    batch: list[tuple[int, bytes]] = []
                    for item in scan:
                        batch.append(item)
                        if len(batch) == _PARSE_ROWS:
                            self._take(batch, number)
                            batch = []
                    self._take(batch, number)
            except FileNotFoundError:
                continue  # committed by another process just now
            self.num_bad += scan.num_bad
            self.num_torn += scan.num_torn
        self.num_replayed = len(self._entries)

    def _take(self, batch: list[tuple[int, bytes]], file_number: int) -> None:
        """Keeps the records of a log; the first valid one of a sample wins."""
        for (offset, payload), record in zip(batch, parse_payloads([payload for _, payload in batch]), strict=True):
            if record is None or not self._is_valid(record):
                self.num_bad += 1
                continue
            key = (record["row"] - self._first) << _SAMPLE_BITS | record["sample"]
            if key in self._entries:
                continue
            self._expect(record["row"] - self._first, record["of"])
            self._keep(key, payload, file_number, offset)
            error = record.get("error")
            self.counts.add_row(error[0] if error else None, record["prompt_tokens"], record["output_tokens"])

    def _is_valid(self, record: dict[str, Any]) -> bool:
        try:
            row, sample, n = record["row"], record["sample"], record["of"]
            numbers = (row, sample, n, record["prompt_tokens"], record["output_tokens"])
            error, text = record.get("error"), record["text"]
        except KeyError:
            return False
        row_in_chunk = row - self._first if type(row) is int else -1
        if any(type(number) is not int for number in numbers) or not 0 <= row_in_chunk < self._num_rows:
            return False
        if error is not None and not (isinstance(error, list) and len(error) == 2):
            return False
        if self._with_token_ids and not isinstance(record.get("token_ids"), list):
            return False
        if not (text is None or isinstance(text, str)) or not 0 <= sample < n < 1 << _SAMPLE_BITS:
            return False
        return self._known_samples(row_in_chunk) in (None, n)

    # -- the end

    def commit(self, carried: pa.Table | None) -> Committed:
        """Publishes the chunk as a part: afterwards it is durable and its logs are gone.

        `carried` are the carried columns of the chunk's input rows, in order. If another process has committed the
        chunk first, its part stands, ours is dropped, and `won` is False. Raises StorageError; the rows are still in
        the logs then and commit may be called again.
        """
        if not self.is_complete():
            raise ValueError(f"chunk {self.chunk.index} has {len(self._entries)} of {self._num_expected} rows")
        try:
            if self._has_part():
                return self._end(self._lost())
            self.sync()
            self._log.close()  # a file that is open cannot be removed from some network file systems
            return self._end(commit_chunk(self._context, self.chunk, self._batches, carried))
        except OSError as error:
            # A log that we read from is gone: another process committed the chunk, unless the output was moved away.
            if isinstance(error, FileNotFoundError) and self._has_part():
                return self._end(self._lost())
            raise storage_error(error, "committing from", self._wal) from error

    def _has_part(self) -> bool:
        path = self._context.layout.part(self.chunk.index)
        with storage_errors("looking for", path):
            return self._fs.exists(path)

    def _lost(self) -> Committed:
        info = winner_of(self._context, self.chunk)
        settle(self._context, self.chunk, None)
        return Committed(self.chunk.index, self.chunk.num_rows, info.counts, won=False)

    def _end(self, committed: Committed) -> Committed:
        self.close()
        if self._on_commit is not None:
            self._on_commit(committed)
        return committed

    def close(self) -> None:
        """Lets go of the chunk without committing it; its logs stay for whoever opens it next."""
        self._log.close()
        self._memory.give_back(self._held)
        self._held = 0
        self.closed = True

    def _groups(self) -> Iterator[list[int]]:
        """The keys in order, in groups of bounded number and size."""
        group: list[int] = []
        size = 0
        for key in sorted(self._entries):
            entry = self._entries[key]
            group.append(key)
            size += len(entry) if isinstance(entry, bytes) else entry & _LEN_MASK
            if len(group) == _GROUP_ROWS or size >= _GROUP_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _payloads(self, keys: list[int]) -> list[bytes]:
        """The payloads of keys, in their order; those that are not in memory are read from the logs by offset."""
        found: dict[int, bytes] = {}
        outside: dict[int, list[tuple[int, int, int]]] = {}
        for key in keys:
            entry = self._entries[key]
            if isinstance(entry, bytes):
                found[key] = entry
            else:
                file_number, offset, size = _unpack(entry)
                outside.setdefault(file_number, []).append((offset, size, key))
        for file_number, places in outside.items():
            path = self._files[file_number]
            with self._fs.open_read(path) as file:
                for offset, size, key in sorted(places):
                    file.seek(offset)
                    payload = unframe(file.read(HEADER_LEN + size))
                    if payload is None or len(payload) != size:
                        raise StorageError(
                            f"{path} has changed or is damaged at byte {offset}. Run the same command again: the "
                            "row is computed anew."
                        )
                    found[key] = payload
        return [found[key] for key in keys]

    def _batches(self) -> Iterator[Records]:
        for keys in self._groups():
            records = []
            for key, record in zip(keys, parse_payloads(self._payloads(keys)), strict=True):
                if record is None or (record["row"] - self._first) << _SAMPLE_BITS | record["sample"] != key:
                    raise StorageError(
                        f"a record in {self._wal} is not the one that was written; run the command again"
                    )
                records.append(record)
            yield records


def _pack(file_number: int, offset: int, size: int) -> int:
    return (file_number << _OFFSET_BITS | offset) << _LEN_BITS | size


def _unpack(place: int) -> tuple[int, int, int]:
    rest, size = place >> _LEN_BITS, place & _LEN_MASK
    return rest >> _OFFSET_BITS, rest & ((1 << _OFFSET_BITS) - 1), size
