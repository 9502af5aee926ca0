"""What lies below an input is read, refused by name, or counted in a warning: never passed over in silence."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchjob.errors import InputDataError, InputMissingError, UsageError
from batchjob.inputs import walk
from batchjob.inputs.find import find_inputs
from batchjob.inputs.formats.detect import detect
from batchjob.inputs.planner import PlanResult
from batchjob.records import Record

Write = Callable[[str, bytes], Path]
PlanOf = Callable[..., PlanResult]
ReadAll = Callable[..., list[Record]]
ROW = b'{"prompt": "x"}\n'
SKIPPED = struct.pack("<II", 0x184D2A53, 6) + b"pzstd!"


def found(root: Path, pattern: str = "") -> tuple[list[str], str]:
    files, warnings = find_inputs([str(root / pattern)])
    return [os.path.relpath(file.path, root) for file in files], "\n".join(warnings)


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


# -- the walk


@pytest.mark.parametrize("pattern", ["", "**", "**/*", "**/*.jsonl", "*"])
def test_links_are_followed_loops_end_and_each_file_is_read_once(write: Write, tmp_path: Path, pattern: str) -> None:
    root = tmp_path / "in"
    write("in/a.jsonl", ROW)
    write("in/real/r.jsonl", ROW)
    write("store/2024/b.jsonl", ROW)
    write("store/blob.jsonl", ROW)
    for name, target in (
        ("2024", tmp_path / "store/2024"), ("c.jsonl", tmp_path / "store/blob.jsonl"), ("loop", "."), ("loop2", "real"),
        ("again.jsonl", "a.jsonl"), ("real/up", ".."), ("real/self", "self"),
    ):  # fmt: skip
        os.symlink(target, root / name)
    (root / "real/self").unlink()
    files, said = found(root, pattern)
    if pattern != "*":  # which meets real/up before 2024
        assert files == ["2024/b.jsonl", "a.jsonl", "c.jsonl", "real/r.jsonl"]
    real = [os.path.relpath(os.path.realpath(root / name), tmp_path) for name in files]
    assert sorted(real) == ["in/a.jsonl", "in/real/r.jsonl", "store/2024/b.jsonl", "store/blob.jsonl"]
    assert said.startswith(f"{root}/again.jsonl is the same file as {root}/a.jsonl")


def test_many_loops_do_not_multiply(write: Write, tmp_path: Path) -> None:
    write("in/a.jsonl", ROW)
    for index in range(12):
        os.symlink(".", tmp_path / f"in/l{index}")
    assert found(tmp_path / "in", "**/*.jsonl")[0] == ["a.jsonl"]


def test_hard_links_are_one_file(write: Write, tmp_path: Path) -> None:
    os.link(write("in/a.jsonl", ROW), tmp_path / "in/b.jsonl")
    files, said = found(tmp_path / "in")
    assert files == ["a.jsonl"]
    assert "b.jsonl is the same file as" in said


@pytest.mark.parametrize("pattern", ["", "**", "**/*.jsonl", "**/*", "*"])
def test_hidden_names_are_left_out_by_directories_and_globs_alike(write: Write, tmp_path: Path, pattern: str) -> None:
    for name in ("_temporary/0/half.jsonl", ".git/x.jsonl", "_old.jsonl", "_SUCCESS", ".a.jsonl.crc", "good.jsonl"):
        write(f"in/{name}", ROW)
    files, said = found(tmp_path / "in", pattern)
    assert files == ["good.jsonl"]
    assert "_temporary" in said or pattern == "**/*.jsonl" or "_old.jsonl" in said
    assert ".git" not in said
    assert ".crc" not in said
    assert found(tmp_path / "in", "_*.jsonl")[0] == ["_old.jsonl"], "a pattern that begins so asks for them"
    assert found(tmp_path / "in", "_temporary")[0] == ["_temporary/0/half.jsonl"]


def test_what_is_left_out_is_counted_by_kind_with_an_example(write: Write, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.json", "t.csv", "u.csv", "v.csv.gz", "README", "x.txt"):
        write(f"in/{name}", ROW)
    _, said = found(tmp_path / "in")
    assert said.count("\n") == 0
    for part in (
        "6 are left out",
        f"2 .csv ({tmp_path}/in/t.csv)",
        "1 .json (",
        "1 .csv.gz",
        "1 without a known ending",
    ):
        assert part in said


@pytest.mark.parametrize(
    "name", ["A.PARQUET", "B.JSONL", "C.NDJSON.GZ", "d.jsonl.xz", "e.jsonl.bz2", "f.jsonl.zstd", "g.PQ", "h.Jsonl.Zst"]
)
def test_names_of_any_case_and_every_compression_are_data(tmp_path: Path, name: str) -> None:
    packers: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zstd": zstd, ".zst": zstd,
    }  # fmt: skip
    if name.lower().endswith(("parquet", "pq")):
        pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(packers.get(Path(name).suffix.lower(), bytes)(ROW))
    assert found(tmp_path) == ([name], "")


def test_what_cannot_be_listed_is_an_error(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("in/a.jsonl", ROW)
    write("in/closed/b.jsonl", ROW)
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(walk.os, "scandir", refuse)
    for pattern in ("in", "in/**/*.jsonl", "in/*/*.jsonl", "in/*"):
        with pytest.raises(InputMissingError, match=r"cannot list .*closed"):
            find_inputs([str(tmp_path / pattern)])
    assert found(tmp_path / "in", "*.jsonl")[0] == ["a.jsonl"]


def test_a_link_that_leads_nowhere_is_an_error_where_data_was_meant(write: Write, tmp_path: Path) -> None:
    write("in/a.jsonl", ROW)
    os.symlink("gone", tmp_path / "in/note")
    os.symlink("self", tmp_path / "in/self")
    assert "2 no regular file" in found(tmp_path / "in")[1]
    os.symlink("/blobs/gone", tmp_path / "in/b.jsonl")
    for pattern in ("in", "in/*.jsonl", "in/b.jsonl"):
        with pytest.raises(InputMissingError, match="a link to /blobs/gone"):
            find_inputs([str(tmp_path / pattern)])


def test_what_can_be_read_only_once_is_refused_at_once(write: Write, tmp_path: Path) -> None:
    write("in/a.jsonl", ROW)
    os.mkfifo(tmp_path / "in/z.jsonl")
    for pattern in ("in", "in/*", "in/z.jsonl"):
        with pytest.raises(InputDataError, match=r"z\.jsonl is a pipe"):
            find_inputs([str(tmp_path / pattern)])
    with pytest.raises(InputDataError, match="a device"):
        find_inputs(["/dev/null"])
    for name in ("/dev/stdin", "/dev/fd/63", "/proc/self/fd/0"):
        with pytest.raises(UsageError, match="write the rows to a file first"):
            find_inputs([name])
    with pytest.raises(InputDataError, match="more than its size"):
        find_inputs(["/proc/self/status"])


def test_a_folder_may_be_named_like_a_file_and_a_glob_may_match_folders(write: Write, tmp_path: Path) -> None:
    write("in/x.jsonl/part-0.jsonl", ROW)
    write("in/lang=de/part-0.jsonl", ROW)
    assert found(tmp_path / "in", "x.jsonl")[0] == ["x.jsonl/part-0.jsonl"]
    assert found(tmp_path / "in", "*.jsonl")[0] == ["x.jsonl/part-0.jsonl"]
    assert found(tmp_path / "in", "lang=*")[0] == ["lang=de/part-0.jsonl"]
    assert len(found(tmp_path / "in", "**/*.jsonl")[0]) == len(found(tmp_path / "in")[0]) == 2


def test_names_of_any_bytes(tmp_path: Path, plan_of: PlanOf, read_all: ReadAll) -> None:
    odd = Path(os.fsdecode(b"\xff\n[x]"))
    (tmp_path / odd).mkdir()
    (tmp_path / odd / "a.jsonl").write_bytes(ROW)
    (tmp_path / "p").mkdir()
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "a.parquet")
    os.rename(tmp_path / "a.parquet", tmp_path / "p" / os.fsdecode(b"\xfe\n.parquet"))
    for path in (tmp_path / odd, tmp_path / odd / "a.jsonl", tmp_path / "p", tmp_path / "p" / "*.parquet"):
        assert [r.fields["prompt"] for r in read_all(plan_of(path))] == ["x"]


# -- formats


def tar_of(data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LFS, "Git LFS pointer.*git lfs pull"),
        (gzip.compress(LFS), "Git LFS pointer"),
        (b"/annex/objects/SHA256E-s1--0\n", "git annex get"),
        (tar_of(ROW), "tar archive"),
        (gzip.compress(tar_of(ROW)), "tar archive"),
        (bz2.compress(tar_of(ROW)), "tar archive"),
        (gzip.compress(b"PAR1...."), "Parquet file that is compressed"),
        (gzip.compress(gzip.compress(ROW)), "compressed twice"),
        (zstd(lzma.compress(ROW)), "compressed twice"),
        (b"\x04\x22\x4d\x18....", "lz4"),
        (SKIPPED + b"\x04\x22\x4d\x18....", "lz4"),
        (b"\xff\x06\x00\x00sNaPpY..", "snappy"),
        (b"7z\xbc\xaf\x27\x1c..", "7z"),
        (ROW.decode().encode("utf-16"), "UTF-16"),
        (ROW.decode().encode("utf-16-le"), "UTF-16"),
        (ROW.decode().encode("utf-32"), "UTF-32"),
        (gzip.compress(ROW.decode().encode("utf-16")), "UTF-16"),
        (bytes(4096), "zeros"),
        (b"<!DOCTYPE html>\n<html>", "web page"),
        (b"\x00\x01\x02\x03", "binary"),
        (b"PARE", "encrypted"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputDataError, match=words) as caught:
        detect(str(path))
    assert str(path) in str(caught.value)


def test_a_pointer_in_the_place_of_a_parquet_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(LFS)
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(InputDataError, match="git lfs pull"):
        detect(str(tmp_path / "a.parquet"))
    with pytest.raises(InputDataError, match="unpack it"):
        detect(str(tmp_path / "b.parquet.gz"))


@pytest.mark.parametrize(
    "data",
    [
        SKIPPED + zstd(ROW) + zstd(ROW),
        SKIPPED * 2 + zstd(ROW) + SKIPPED + zstd(ROW) + SKIPPED,
        lzma.compress(ROW) + b"\0" * 8 + lzma.compress(ROW) + b"\0" * 4,
        bz2.compress(ROW) + bz2.compress(ROW),
        gzip.compress(ROW) + gzip.compress(b"") + gzip.compress(ROW),
        lzma.compress(ROW * 2, check=lzma.CHECK_NONE),
    ],
)
def test_frames_and_streams_one_after_the_other(
    tmp_path: Path, plan_of: PlanOf, read_all: ReadAll, data: bytes
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    result = plan_of(path)
    assert [r.fields for r in read_all(result)] == [{"prompt": "x"}] * 2
    assert result.num_bad_rows == 0


@pytest.mark.parametrize("pack", [lzma.compress, bz2.compress])
@pytest.mark.parametrize("cut", ["end", "middle", "tail"])
def test_damage_of_xz_and_bzip2_is_a_row_where_it_is(
    tmp_path: Path, plan_of: PlanOf, read_all: ReadAll, pack: Callable[[bytes], bytes], cut: str
) -> None:
    texts = (hashlib.blake2b(str(index).encode()).hexdigest() * 8 for index in range(3000))  # two blocks of bzip2
    rows = b"".join(b'{"a": "%s"}\n' % text.encode() for text in texts)
    data = pack(rows)
    if cut == "end":
        data = data[:-5]
    elif cut == "middle":
        data = data[: len(data) // 2] + b"\xff" * 40 + data[len(data) // 2 + 40 :]
    else:
        data += b"tail that is no stream"
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    result = plan_of(path)
    records = read_all(result)
    kinds = [r.error.type for r in records if r.error]
    assert kinds[-1] == "input_damaged"
    assert len(kinds) == 1 or cut == "middle", "a block is checked when it is over"
    assert records[-1].error is not None
    assert len(records) > 100 if cut != "tail" else len(records) == 3001


def test_xz_and_bzip2_bombs_take_no_memory(tmp_path: Path) -> None:
    from batchjob.inputs.streams import BLOCK, open_bytes

    for name, data in (("xz", lzma.compress(bytes(1 << 27))), ("bz2", bz2.compress(bytes(1 << 27)))):
        path = tmp_path / name
        path.write_bytes(data)
        source = open_bytes(str(path), name)
        assert max(len(source.read(BLOCK)) for _ in range(200)) <= BLOCK
        source.close()


# -- files without rows


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"prompt,id\nhello,1\n", "not one of its 2 rows"),
        (b'[\n{"prompt": "x"},\n{"prompt": "y"}\n]\n', "a JSON array.*jq"),
        (b'{\n  "prompt": "x"\n}\n', "indented JSON object.*jq"),
        (b'[{"prompt": "x"}, {"prompt": "y"}]\n', "a JSON array.*jq"),
        (gzip.compress(b"a b c\n"), "not one of its 1 rows"),
        (gzip.compress(ROW * 99)[:12], "not one of its 1 rows"),
        (b"one line", "not one of its 1 rows"),
    ],
)
def test_a_file_without_one_good_row_is_an_error_whatever_the_others_hold(
    write: Write, tmp_path: Path, plan_of: PlanOf, data: bytes, words: str
) -> None:
    write("in/a.jsonl", ROW * 10_000)
    (tmp_path / "in/b.jsonl").write_bytes(data)
    with pytest.raises(InputDataError, match=words) as caught:
        plan_of(tmp_path / "in")
    assert "b.jsonl" in str(caught.value)


def test_files_without_rows_are_counted(write: Write, tmp_path: Path, plan_of: PlanOf) -> None:
    for name, data in (("a", ROW), ("b", b""), ("c", b"\n\n")):
        write(f"in/{name}.jsonl", data)
    assert any("2 input files hold no rows" in line and "b.jsonl" in line for line in plan_of(tmp_path / "in").warnings)


def test_a_file_that_vanishes_while_it_is_planned_is_exit_66(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_of: PlanOf
) -> None:
    from batchjob.inputs import planner

    path = write("a.jsonl", ROW)

    def gone(*_: Any) -> Any:
        files = [detect(str(path))]
        path.unlink()
        return files, []

    monkeypatch.setattr(planner, "find_inputs", gone)
    with pytest.raises(InputMissingError, match=r"a\.jsonl"):
        plan_of(path)
