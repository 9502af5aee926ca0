"""Bytes and physical lines of an input file, plain or compressed, with bounded memory."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Generator, Iterator
from typing import Any, Protocol

from batchjob.errors import StorageError
from batchjob.records import RowError

BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"
# Text of any use is not packed more tightly than this; a bomb is. It only ever ends a file that is this large unpacked.
_MAX_EXPANSION = 500
_EXPANSION_FLOOR = 1 << 30  # bytes
_FEED = 4096  # compressed bytes per call: what such a piece held before a damaged place is lost
_XZ_MEMORY = 1 << 30  # bytes that the window of an xz file may take: 16 times that of `xz -9`
_ZSTD_FEED = 1024  # compressed bytes per call: even the densest input then expands to at most 32 MiB


class DamagedError(Exception):
    """The compressed data ends early, does not decompress, or never ends; what came before it is good."""


class ByteSource(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


class _Gzip:
    def __init__(self, path: str) -> None:
        self._file = gzip.open(path, "rb")  # noqa: SIM115

    def read(self, size: int, /) -> bytes:
        try:
            return self._file.read1(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedError(str(error)) from None

    def close(self) -> None:
        self._file.close()


class _Zstd:
    """Frames one after the other. The library's own stream reader cannot tell a cut file from a whole one."""

    def __init__(self, path: str) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._make = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._file = open(path, "rb")  # noqa: SIM115
        self._frame = self._make()
        self._inside = False
        self._damage = ""

    def read(self, size: int, /) -> bytes:
        out: list[bytes] = []
        total = 0
        while total < size and not self._damage:
            data = self._file.read(_ZSTD_FEED)
            if not data:
                if self._inside:
                    self._damage = "the compressed data ends inside a frame"
                break
            while data:
                self._inside = True
                try:
                    piece = self._frame.decompress(data)
                except self._error as error:
                    self._damage = str(error)
                    break
                if piece:
                    out.append(piece)
                    total += len(piece)
                if not self._frame.eof:
                    break
                data = self._frame.unused_data
                self._frame = self._make()
                self._inside = False
        if self._damage and not out:  # what is good is handed out first
            raise DamagedError(self._damage)
        return b"".join(out)

    def close(self) -> None:
        self._file.close()


class _Streams:
    """xz or bzip2: streams one after the other. Python's own files cannot bound the memory of a window, and take what
    follows a stream for its end."""

    def __init__(self, path: str, compression: str) -> None:
        if compression == "xz":
            import lzma

            self._errors: tuple[type[Exception], ...] = (lzma.LZMAError, MemoryError)
            self._make: Any = lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
        else:
            import bz2

            self._errors = (OSError, EOFError)
            self._make = bz2.BZ2Decompressor
        self._pads = compression == "xz"  # zeros may stand between streams
        self._file = open(path, "rb")  # noqa: SIM115
        self._stream = self._make()

    def read(self, size: int, /) -> bytes:
        while True:
            data = b""
            if self._stream.eof:
                data = self._next_stream()
                if not data:
                    return b""
            elif self._stream.needs_input:
                data = self._file.read(_FEED)
                if not data:
                    raise DamagedError("the compressed data ends inside a stream")
            try:
                out: bytes = self._stream.decompress(data, size)
            except self._errors as error:
                raise DamagedError(str(error) or "out of memory") from None
            if out:
                return out

    def _next_stream(self) -> bytes:
        """The bytes that the next stream begins with, for a new decompressor; empty at the end of the file."""
        data: bytes = self._stream.unused_data
        while True:
            if self._pads:
                data = data.lstrip(b"\0")
            if data:
                self._stream = self._make()
                return data
            data = self._file.read(_FEED)
            if not data:
                return b""

    def close(self) -> None:
        self._file.close()


class _Bounded:
    """Ends a compressed file that expands without measure, always at the same byte."""

    def __init__(self, source: ByteSource, path: str) -> None:
        self._source = source
        self._left = max(_EXPANSION_FLOOR, _MAX_EXPANSION * os.path.getsize(path))
        self._is_over = False

    def read(self, size: int, /) -> bytes:
        data = b"" if self._is_over else self._source.read(size)
        self._is_over = self._is_over or len(data) > self._left
        data = data[: self._left]
        if self._is_over and not data:  # what is good is handed out first
            raise DamagedError(f"it expands more than {_MAX_EXPANSION}-fold; unpack it yourself if that is right")
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._source.close()


def open_bytes(path: str, compression: str, offset: int = 0) -> ByteSource:
    """The decompressed bytes of a file from `offset` on. A plain file seeks; a compressed one reads and discards.

    All rows of text and all looks at the start of a file come from here. Only pyarrow (`parquet_file.open_parquet`) and
    the digest of a whole file (`stamps.digest`) open inputs themselves.
    """
    if not compression:
        file = open(path, "rb", buffering=0)  # noqa: SIM115
        file.seek(offset)
        return file
    source: ByteSource = _Bounded(_unpacked(path, compression), path)
    left = offset
    while left > 0:
        data = source.read(min(left, BLOCK))
        if not data:
            raise DamagedError(f"the decompressed data is shorter than {offset} bytes")
        left -= len(data)
        if left < 0:  # a source may return more than asked for
            return _Pushback(data[left:], source)
    return source


def _unpacked(path: str, compression: str) -> ByteSource:
    if compression == "gz":
        return _Gzip(path)
    return _Zstd(path) if compression == "zst" else _Streams(path, compression)


class _Pushback:
    def __init__(self, head: bytes, source: ByteSource) -> None:
        self._head, self._source = head, source

    def read(self, size: int, /) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        return self._source.read(size)

    def close(self) -> None:
        self._source.close()


def iter_lines(
    path: str, compression: str, *, offset: int = 0, line: int = 1, max_line_bytes: int
) -> Generator[tuple[int, int, bytes | RowError], None, None]:
    """(byte offset, physical line number, line without its newline byte) for every line that is not blank.

    Only the newline byte ends a line. A byte order mark at the start of the file is left out. A line longer than
    `max_line_bytes` comes as a RowError and is never held in memory; a damaged end of a compressed file comes as one
    last RowError, in place of the piece of a line before it.
    """
    try:
        source = open_bytes(path, compression, offset)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    too_long = RowError("row_too_large", f"the line is longer than --max-row-bytes ({max_line_bytes:,})")
    try:
        for size, raw in _split(source, max_line_bytes):
            if raw is None:
                yield offset, line, too_long
            else:
                if offset == 0:
                    raw = raw.removeprefix(_BOM)
                if raw and not raw.isspace():
                    yield offset, line, raw
            offset += size + 1
            line += 1
    except DamagedError as error:
        message = f"the {compression} file is damaged here, later rows are missing: {error}"
        yield offset, line, RowError("input_damaged", message)
    except OSError as error:
        raise StorageError(f"reading {path} failed: {error.strerror or error}") from error
    finally:
        source.close()


def _split(source: ByteSource, max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """(length, line without newline) of each line; None in place of a line above the limit."""
    pending: list[bytes] = []  # the pieces of a line that began in an earlier block
    pending_len = 0
    while block := source.read(BLOCK):
        lines = block.split(b"\n")
        tail = lines.pop()
        for raw in lines:
            size = len(raw)
            if pending_len:
                size += pending_len
                raw = b"".join([*pending, raw])
                pending.clear()
                pending_len = 0
            yield size, raw if size <= max_line_bytes else None
        pending_len += len(tail)
        if pending_len > max_line_bytes:
            pending.clear()
        elif tail:
            pending.append(tail)
    if pending_len:
        yield pending_len, b"".join(pending) if pending_len <= max_line_bytes else None
