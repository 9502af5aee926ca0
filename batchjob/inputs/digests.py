"""Digests of what is read of an input, so that a later read can be held against the first.

The digest of some rows is the sum of the rows' BLAKE2b hashes, each salted with the row's ordinal in its file:
sums of parts add up, so one pass over a file gives the digests of whatever chunks are cut later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from batchjob.errors import InputMissingError
from batchjob.plan import InputFile, Segment
from batchjob.records import RowError

MASK = (1 << 128) - 1
_MAX_HELD = 64 << 20  # bytes of rows that wait until all of their segment is known to be as planned

RawRow = tuple[int, int, bytes | RowError]  # byte offset, line number, the bytes of the row


def row_digest(row: int, raw: bytes | RowError) -> int:
    """The digest of one row's bytes, or of its error where they cannot be read. `row` is its ordinal in the file."""
    salt = row.to_bytes(16, "little")
    if isinstance(raw, RowError):
        hasher = hashlib.blake2b(raw.type.encode(), digest_size=16, salt=salt, person=b"error")
    else:
        hasher = hashlib.blake2b(raw, digest_size=16, salt=salt)
    return int.from_bytes(hasher.digest(), "little")


def same_rows(file: InputFile, segment: Segment, rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """The rows of a segment, handed on once all of them have the digest that the plan gives. Those of a segment that
    is too large to be held come at once, and the end is checked. Raises InputMissingError."""
    held: list[RawRow] | None = []
    size = total = 0
    for row, raw in enumerate(rows, segment.first_row):
        total += row_digest(row, raw[2])
        if held is None:
            yield raw
            continue
        held.append(raw)
        size += len(raw[2]) if isinstance(raw[2], bytes) else 0
        if size > _MAX_HELD:
            yield from held
            held = None
    if f"{total & MASK:032x}" != segment.digest:
        last = segment.first_row + segment.num_rows
        raise InputMissingError(
            f"input file {file.path} has changed: its rows {segment.first_row + 1:,} to {last:,} are not those that "
            "were planned; put the old file back, or start a new output"
        )
    yield from held or ()
