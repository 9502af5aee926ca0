"""Physical lines: what ends one, what is a row, and what happens to giant lines and damaged files."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from batchjob.errors import StorageError
from batchjob.inputs import streams
from batchjob.inputs.streams import iter_lines
from batchjob.records import RowError

Write = Callable[[str, bytes], Path]


def lines(path: Path, compression: str = "", **options: int) -> list[tuple[int, int, bytes | RowError]]:
    return list(iter_lines(str(path), compression, **{"max_line_bytes": 1 << 20, **options}))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_line_numbers_are_physical_and_blank_lines_are_no_rows(write: Write, name: str) -> None:
    path = write(name, b"\xef\xbb\xbfone\r\n\n \t\r\ntwo\nlast")
    compression = name[8:]
    assert lines(path, compression) == [(0, 1, b"one\r"), (13, 4, b"two"), (17, 5, b"last")]


def test_a_byte_order_mark_alone_is_an_empty_file(write: Write) -> None:
    assert lines(write("a", b"\xef\xbb\xbf\n")) == []


def test_only_the_newline_byte_ends_a_line(write: Write) -> None:
    data = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh".encode()
    assert lines(write("a", data + b"\n")) == [(0, 1, data)]


@given(
    pieces=st.lists(st.text("ab\n", max_size=8), max_size=12),
    block=st.integers(1, 7),
    compression=st.sampled_from(["", "gz", "zst"]),
)
def test_block_size_and_compression_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], block: int, compression: str
) -> None:
    data = "".join(pieces).encode()
    path = tmp_path_factory.mktemp("lines") / "a"
    packed = {"": data, "gz": gzip.compress(data), "zst": zstandard.ZstdCompressor().compress(data)}[compression]
    path.write_bytes(packed)
    expected = [(number, raw) for number, raw in enumerate(data.split(b"\n"), 1) if raw]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "BLOCK", block)
        found = lines(path, compression)
    assert [(line, raw) for _, line, raw in found] == expected
    for offset, line, raw in found:  # every position can be returned to
        assert lines(path, compression, offset=offset, line=line)[0] == (offset, line, raw)


def test_a_line_above_the_limit_is_an_error_and_the_next_one_is_read(write: Write) -> None:
    path = write("a", b"x" * 100 + b"\n" + b"y" * 10 + b"\n" + b"z" * 11)
    found = lines(path, max_line_bytes=10)
    assert [(offset, line) for offset, line, _ in found] == [(0, 1), (101, 2), (112, 3)]
    assert found[1][2] == b"y" * 10
    for index in (0, 2):
        error = found[index][2]
        assert isinstance(error, RowError)
        assert error.type == "row_too_large"
        assert "10" in error.message


def test_a_giant_line_is_never_held_in_memory(write: Write) -> None:
    path = write("a.gz", b"x" * (64 << 20) + b"\nshort\n")
    tracemalloc.start()
    found = lines(path, "gz", max_line_bytes=1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found[1][2] == b"short"
    assert peak < 16 << 20


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_cut_off_anywhere_the_rows_before_the_cut_are_kept(write: Write, tmp_path: Path, compression: str) -> None:
    rows = [b"row %d %x" % (index, index * 7919**5) for index in range(400)]
    whole = write(f"a.{compression}", b"\n".join(rows) + b"\n").read_bytes()
    cut = tmp_path / "cut"
    most = 0
    for size in range(20, len(whole), 97):
        cut.write_bytes(whole[:size])
        found = [raw for _, _, raw in lines(cut, compression)]
        assert isinstance(found[-1], RowError)
        assert found[-1].type == "input_damaged"
        assert found[:-1] == rows[: len(found) - 1]
        assert found == [raw for _, _, raw in lines(cut, compression)]
        most = max(most, len(found))
    assert most > 200 or compression == "zst"  # one zstd block is all or nothing


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_a_damaged_middle_is_found(write: Write, compression: str) -> None:
    path = write(f"a.{compression}", b"".join(b"row %d\n" % index for index in range(5000)))
    data = bytearray(path.read_bytes())
    for index in range(len(data) // 2, len(data) // 2 + 50):
        data[index] ^= 0x5A
    path.write_bytes(data)
    last = lines(path, compression)[-1][2]
    assert isinstance(last, RowError)
    assert last.type == "input_damaged"


def test_several_members_or_frames_read_as_one(tmp_path: Path) -> None:
    first, second = b"one\ntw", b"o\nthree\n"
    gz, zst = tmp_path / "a.gz", tmp_path / "a.zst"
    gz.write_bytes(gzip.compress(first) + gzip.compress(second))
    pack = zstandard.ZstdCompressor()
    zst.write_bytes(pack.compress(first) + pack.compress(b"") + pack.compress(second))
    for path, compression in ((gz, "gz"), (zst, "zst")):
        assert [raw for _, _, raw in lines(path, compression)] == [b"one", b"two", b"three"]


def test_a_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone"):
        lines(tmp_path / "gone")
