"""Walks the header of a GGUF file and holds every count and length in it against the size of the file.

Layout (GGUF versions 2 and 3, little endian): "GGUF", u32 version, u64 tensors, u64 key-value pairs; then the pairs
(string key, u32 type, value), then the tensors (string name, u32 dimensions, u64 each, u32 type, u64 offset).
A string is a u64 length and its bytes; an array is a u32 type, a u64 count and the items.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from batchjob.errors import UnsupportedModelError
from batchjob.models.pointers import refuse_pointer

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 3  # of arrays in arrays
_MAX_DIMENSIONS = 8
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.left = size

    def number(self, code: str) -> int:
        width = struct.calcsize(code)
        self.claim(width)
        (value,) = struct.unpack("<" + code, self.file.read(width))
        return int(value)

    def skip(self, num_bytes: int) -> None:
        self.claim(num_bytes)
        self.file.seek(num_bytes, 1)

    def claim(self, num_bytes: int) -> None:
        if num_bytes > self.left:
            raise ValueError(f"it tells of {num_bytes:,} more bytes where the file has {self.left:,}")
        self.left -= num_bytes

    def fits(self, count: int, min_bytes: int, what: str) -> int:
        if count * min_bytes > self.left:
            raise ValueError(f"it tells of {count:,} {what}, more than the file could hold")
        return count

    def string(self) -> None:
        self.skip(self.number("Q"))

    def value(self, kind: int, depth: int = 0) -> None:
        if kind in _SCALAR_BYTES:
            self.skip(_SCALAR_BYTES[kind])
        elif kind == _STRING:
            self.string()
        elif kind == _ARRAY and depth < _MAX_DEPTH:
            item_kind = self.number("I")
            count = self.fits(self.number("Q"), _SCALAR_BYTES.get(item_kind, 8), "array items")
            if item_kind in _SCALAR_BYTES:
                self.skip(count * _SCALAR_BYTES[item_kind])
                return
            for _ in range(count):
                self.value(item_kind, depth + 1)
        else:
            raise ValueError(f"it has a value of unknown type {kind}, or arrays too deep")


def check_header(path: Path) -> None:
    """Raises UnsupportedModelError unless the header is sound and fits into the file."""
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UnsupportedModelError(f"{path} is not a GGUF file")
        reader = _Reader(file, size - 4)
        try:
            _walk(reader)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{path} has a damaged header: {error}; was the download interrupted?"
            ) from None


def _walk(reader: _Reader) -> None:
    version = reader.number("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not 2 or 3")
    num_tensors = reader.fits(reader.number("Q"), _MIN_TENSOR_BYTES, "tensors")
    num_pairs = reader.fits(reader.number("Q"), _MIN_PAIR_BYTES, "key-value pairs")
    for _ in range(num_pairs):
        reader.string()
        reader.value(reader.number("I"))
    for _ in range(num_tensors):
        reader.string()
        num_dimensions = reader.number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dimensions} dimensions")
        reader.skip(8 * num_dimensions + 4)
        if reader.number("Q") > reader.left:
            raise ValueError("a tensor lies past the end of the file")
