"""Finding input files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.errors import InputDataError, InputMissingError, UsageError
from batchjob.inputs.find import find_inputs
from batchjob.inputs.formats.detect import detect

Write = Callable[[str, bytes], Path]
ROW = b'{"prompt": "x"}\n'


def names(root: Path, *patterns: str) -> list[str]:
    files, _ = find_inputs([str(root / pattern) for pattern in patterns])
    return [os.path.relpath(file.path, root) for file in files]


def test_patterns_keep_their_order_and_files_are_sorted(write: Write, tmp_path: Path) -> None:
    for name in ("d/b.jsonl", "d/a.jsonl", "d/sub/c.ndjson.gz", "d/note.txt", "d/.h.jsonl", "d/_s.jsonl", "z.jsonl"):
        write(name, ROW)
    assert names(tmp_path, "z.jsonl", "d") == ["z.jsonl", "d/a.jsonl", "d/b.jsonl", "d/sub/c.ndjson.gz"]
    assert names(tmp_path, "d/[ab].jsonl") == ["d/a.jsonl", "d/b.jsonl"]
    assert names(tmp_path, "**/c.*") == ["d/sub/c.ndjson.gz"]


def test_a_directory_gives_json_files_only_where_there_are_no_others(write: Write, tmp_path: Path) -> None:
    write("d/rows.json", ROW)
    assert names(tmp_path, "d") == ["d/rows.json"]
    write("d/rows.jsonl", ROW)
    assert names(tmp_path, "d") == ["d/rows.jsonl"]


def test_a_file_named_twice_is_read_once_with_a_warning(write: Write, tmp_path: Path) -> None:
    path = write("a.jsonl", ROW)
    files, warnings = find_inputs([str(path), str(tmp_path / "*.jsonl")])
    assert [file.path for file in files] == [str(path)]
    assert len(warnings) == 1
    assert "a.jsonl" in warnings[0]


@pytest.mark.parametrize("pattern", ["gone.jsonl", "gone*.jsonl", "empty"])
def test_nothing_there_is_exit_66_and_names_the_pattern(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputMissingError, match=pattern.replace("*", r"\*")):
        find_inputs([str(tmp_path / pattern)])


@pytest.mark.parametrize("pattern", ["-", "hf://datasets/x", "s3://bucket/x.jsonl"])
def test_what_is_not_a_local_file_is_a_usage_error(pattern: str) -> None:
    with pytest.raises(UsageError, match="local"):
        find_inputs([pattern])


def test_content_counts_more_than_the_name(write: Write, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "really.jsonl")
    assert detect(str(tmp_path / "really.jsonl")).format == "parquet"
    packed = write("x.gz", ROW).read_bytes()
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(packed)
    assert detect(str(plain)).compression == "gz"
    (tmp_path / "not.jsonl.gz").write_bytes(ROW)
    assert detect(str(tmp_path / "not.jsonl.gz")).compression == ""


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.parquet", b"", "not a Parquet file"),
        ("a.parquet", b"plain text", "not a Parquet file"),
        ("a.jsonl", b"PK\x03\x04....", "zip"),
        ("a.jsonl", "\ufeff{}".encode("utf-16-le"), "UTF-16"),
        ("a.csv", b"a,b\n1,2\n", ".csv files are not read"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputDataError, match=words) as caught:
        find_inputs([str(path)])
    assert str(path) in str(caught.value)


def test_parquet_and_jsonl_do_not_mix(write: Write, tmp_path: Path) -> None:
    write("a.jsonl", ROW)
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(InputDataError, match=r"a\.jsonl"):
        find_inputs([str(tmp_path)])
