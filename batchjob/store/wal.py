"""The log of finished rows of one chunk: one file per attempt, appended to, never repaired.

A record is the CRC32 of its payload in eight hex digits, a space, the payload (one JSON object), a newline. It holds
what was generated (see `columns`), never what the input already has. A reader that meets a bad record continues at the
next newline.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from batchjob.store.fsops import FsOps

HEADER_LEN = 9  # checksum and space
_BLOCK_BYTES = 1 << 20
_LOG_JOB = re.compile(r"\.job-([0-9a-f]+)\.")


def encode_partial(row_index: int, sample_index: int, num_prompt_tokens: int, token_ids: Sequence[int]) -> bytes:
    """The payload for a sample that was stopped, with the output tokens that it has so far."""
    ids = ",".join(map(str, token_ids))
    return (
        f'{{"row":{row_index},"sample":{sample_index},"prompt_tokens":{num_prompt_tokens},"partial":[{ids}]}}'
    ).encode()


def frame(payload: bytes) -> bytes:
    """The record around a payload."""
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def log_name(attempt: str, job_id: str) -> str:
    """The name of an attempt's log of a chunk, without its ending: it holds the attempt and the job."""
    return f"{attempt}.job-{job_id}"


def is_foreign(name: str, job_id: str) -> bool:
    """True if a log's name holds the id of another job. Logs of earlier versions hold no id."""
    found = _LOG_JOB.search(name)
    return found is not None and found[1] != job_id


def unframe(record: bytes) -> bytes | None:
    """The payload of a record (its newline may be missing); None if the record is damaged."""
    payload = record[HEADER_LEN:-1] if record.endswith(b"\n") else record[HEADER_LEN:]
    if record[8:HEADER_LEN] != b" ":
        return None
    try:
        expected = int(record[:8], 16)
    except ValueError:
        return None
    return payload if zlib.crc32(payload) == expected and payload else None


class LogScan:
    """Reads a log: iterating gives (offset of the record, payload) of every undamaged record.

    Afterwards `num_torn` is 1 if the file ended inside a record (a kill, or another process is still writing), and
    `num_bad` counts damaged lines before that. Memory is bounded by the longest line.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_torn = 0
        self.num_bad = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        offset = 0  # of the pieces that no newline has ended yet
        pieces: list[bytes] = []
        while block := self._file.read(_BLOCK_BYTES):
            first, *rest = block.split(b"\n")
            pieces.append(first)
            if not rest:
                continue
            for line in (b"".join(pieces), *rest[:-1]):
                payload = unframe(line)
                if payload is not None:
                    yield offset, payload
                else:
                    self.num_bad += 1
                offset += len(line) + 1
            pieces = [rest[-1]]
        tail = b"".join(pieces)
        if tail:
            payload = unframe(tail)
            if payload is not None:  # whole, only its newline is missing
                yield offset, payload
            else:
                self.num_torn = 1


def parse_payloads(payloads: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """The records of payloads, parsed in one go; None for one that is no JSON object."""
    try:
        records = json.loads(b"[" + b",".join(payloads) + b"]")
        if len(records) == len(payloads) and all(type(record) is dict for record in records):
            return list(records)
    except (ValueError, RecursionError):
        pass
    return [_parse(payload) for payload in payloads]


def _parse(payload: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class ChunkLog:
    """This attempt's log of one chunk. The file is made by the first append, with durable directory entries.

    After a failed write or fsync the file is never touched again: what is in it is unknown (a failed fsync may have
    marked pages clean). `abandon` makes the next append start a new file, and notes in `lost` if records were not
    synced before: they must be written again.
    """

    def __init__(
        self, fs: FsOps, directory: Path, name: str, *, before_open: Callable[[], None] = lambda: None
    ) -> None:
        """`name` is the start of the names of its files; see `log_name`."""
        self._fs = fs
        self._before_open = before_open
        self._write = fs.write
        self._directory = directory
        self._name = name
        self._num_files = 0
        self._fd = -1
        self.path: Path | None = None
        self.size = 0
        self.dirty = False  # something was written since the last sync
        self.lost = False

    def append(self, record: bytes) -> int:
        """Writes a record, with one write() unless that comes back short, and returns its offset. Raises OSError."""
        if self._fd < 0:
            self._open()
        offset = self.size
        self.dirty = True
        written = self._write(self._fd, record)
        if written != len(record):
            self._fs.write_all(self._fd, memoryview(record)[written:])
        self.size = offset + len(record)
        return offset

    def _open(self) -> None:
        name = f"{self._name}{f'.{self._num_files}' if self._num_files else ''}.log"
        path = self._directory / name
        self._num_files += 1
        self._before_open()
        for _ in range(5):
            self._fs.ensure_dir(self._directory)
            try:
                self._fd = self._fs.create(path)
                break
            except FileNotFoundError:  # another process committed the chunk and removed the directory in between
                continue
        else:
            self._fd = self._fs.create(path)
        self.path, self.size = path, 0
        try:
            self._fs.fsync_dir(self._directory)
        except FileNotFoundError:
            pass  # removed in between by the chunk's commit: this log is no longer needed

    def sync(self) -> None:
        """Calls fdatasync, if anything was written since the last one. Raises OSError; abandon the log then."""
        if self.dirty and self._fd >= 0:
            self._fs.fdatasync(self._fd)
        self.dirty = False

    def abandon(self) -> None:
        self.lost = self.lost or self.dirty
        self.close()

    def close(self) -> None:
        """Closes the file; synced records stay."""
        fd, self._fd = self._fd, -1
        self.dirty = False
        if fd >= 0:
            try:
                self._fs.close(fd)
            except OSError:
                pass  # some file systems report a failed write once more here
