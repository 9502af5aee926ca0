"""Inputs that are small and want to become large: nesting, compression, dictionaries. Each has a bound."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchjob.errors import InputDataError
from batchjob.inputs import streams
from batchjob.inputs.formats import jsonl, parquet, parquet_file
from batchjob.inputs.planner import make_plan
from batchjob.records import RowError
from batchjob.spec import JobSpec

DEEP = jsonl.MAX_DEPTH


def nested(depth: int, brackets: str = "[]") -> bytes:
    """A row whose lists (or objects) nest that deep, the row itself counted."""
    left, right = ("[", "]") if brackets == "[]" else ('{"a":', "}")
    return ('{"prompt": "x", "deep": ' + left * (depth - 1) + "1" + right * (depth - 1) + "}").encode()


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_nesting_has_a_limit_that_does_not_depend_on_who_reads(brackets: str) -> None:
    row, error = jsonl.parse_row(nested(DEEP, brackets))
    assert error is None
    assert row is not None
    json.dumps(row)
    for depth in (DEEP + 1, 5_000, 100_000):
        row, error = jsonl.parse_row(nested(depth, brackets))
        assert row is None
        assert error == RowError("invalid_json", f"the JSON is nested more than {DEEP} deep")


def test_the_same_rows_are_too_deep_from_deep_inside_a_program() -> None:
    def from_below(levels: int) -> Any:
        return from_below(levels - 1) if levels else jsonl.parse_row(nested(DEEP))

    assert from_below(300)[1] is None


def test_many_brackets_that_do_not_nest_are_fine() -> None:
    row, error = jsonl.parse_row(json.dumps({"prompt": "[[{{" * 500, "list": [[i] for i in range(500)]}).encode())
    assert error is None
    assert row is not None


def test_a_row_too_deep_costs_itself_alone(run_job: Callable[..., Any], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([b'{"prompt": "a"}', nested(100_000), b'{"prompt": "b"}']) + b"\n")
    result, _ = run_job(source)
    assert (result.num_ok, result.errors) == (2, {"invalid_json": 1})


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_a_file_that_expands_without_measure_is_cut_at_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.setattr(streams, "_EXPANSION_FLOOR", 1 << 16)
    monkeypatch.setattr(streams, "_MAX_EXPANSION", 50)
    data = b'{"prompt": "0"}\n' * 400_000
    packed = gzip.compress(data) if compression == "gz" else zstandard.ZstdCompressor().compress(data)
    path = tmp_path / f"bomb.jsonl.{compression}"
    path.write_bytes(packed)
    assert len(data) > 100 * len(packed)
    bound = max(1 << 16, 50 * len(packed)) // 16
    for block in (1 << 20, 1000):
        monkeypatch.setattr(streams, "BLOCK", block)
        lines = [raw for _, _, raw in streams.iter_lines(str(path), compression, max_line_bytes=1 << 20)]
        assert isinstance(lines[-1], RowError)
        assert lines[-1].type == "input_damaged"
        assert "expands more than 50-fold" in lines[-1].message
        assert len(lines) == bound + 1
        later = streams.iter_lines(str(path), compression, offset=16 * (bound - 5), line=7, max_line_bytes=1 << 20)
        assert len(list(later)) == 6, "the cut is at the same row wherever reading starts"


def test_a_file_within_measure_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_EXPANSION_FLOOR", 16 * 1000)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "0"}\n' * 1000))
    monkeypatch.setattr(streams, "_MAX_EXPANSION", 1)
    assert len(list(streams.iter_lines(str(path), "gz", max_line_bytes=1 << 20))) == 1000


def dictionary_bomb(path: Path, *, num_rows: int, size: int) -> Path:
    """Rows that all hold one long text, kept once in the file."""
    values = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array(["x" * size]))
    pq.write_table(
        pa.table({"prompt": values.dictionary_decode() if size * num_rows < 1 << 24 else values}),
        path,
        store_schema=False,
        compression="zstd",
        dictionary_pagesize_limit=1 << 30,
    )
    return path


def test_a_batch_of_a_dictionary_bomb_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_WORST_BATCH_BYTES", 8 << 20)
    path = dictionary_bomb(tmp_path / "bomb.parquet", num_rows=2_000, size=1 << 20)
    assert path.stat().st_size < 1 << 20
    rows = 0
    for batch in parquet_file.iter_batches(str(path), 0, ["prompt"]):
        assert batch.nbytes < 10 << 20
        rows += batch.num_rows
    assert rows == 2_000


# VmHWM is of this program alone; the resource usage of a process begins with the peak of the one that started it.
MEASURE = """
import re, sys
from batchjob.inputs.formats import parquet_file
rows = sum(batch.num_rows for batch in parquet_file.iter_batches(sys.argv[1], 0, ["prompt"]))
print(rows, int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


def test_the_memory_of_a_dictionary_bomb_is_bounded(tmp_path: Path) -> None:
    """3,000 rows of 4 MiB are 12 GiB in 1 MiB of file: read as batches of 4,096 rows they would not fit anywhere."""
    path = dictionary_bomb(tmp_path / "bomb.parquet", num_rows=3_000, size=4 << 20)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    rows, mebibytes = map(int, done.stdout.split())
    assert rows == 3_000
    assert mebibytes < 1500


def test_ordinary_dictionaries_keep_their_batches_large(tmp_path: Path) -> None:
    path = tmp_path / "ordinary.parquet"
    pq.write_table(pa.table({"prompt": [f"text {i % 700}" for i in range(50_000)]}), path)
    assert max(batch.num_rows for batch in parquet_file.iter_batches(str(path), 0, ["prompt"])) == 4096


def test_carried_columns_that_do_not_fit_are_refused_with_a_remedy(
    run_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_MAX_CARRIED_BYTES", 1 << 20)
    pq.write_table(pa.table({"prompt": ["a"] * 64, "large": ["y" * 50_000] * 64}), tmp_path / "in.parquet")
    with pytest.raises(InputDataError, match="--keep-columns"):
        run_job(tmp_path / "in.parquet")
    result, _ = run_job(tmp_path / "in.parquet", keep_columns="prompt", output=str(tmp_path / "second"))
    assert result.num_ok == 64


PICKLE = b"cos\nsystem\n(S'touch %s'\ntR."


def test_an_extension_type_brings_no_code(tmp_path: Path, run_job: Callable[..., Any]) -> None:
    """Old pyarrow unpickled what a file's schema held (CVE-2023-47248)."""
    canary = tmp_path / "canary"
    field = pa.field("prompt", pa.string()).with_metadata(
        {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": PICKLE % str(canary).encode()}
    )
    pq.write_table(pa.Table.from_arrays([pa.array(["a", "b"])], schema=pa.schema([field])), tmp_path / "in.parquet")
    result, _ = run_job(tmp_path / "in.parquet")
    assert result.rows_done == 2
    assert not canary.exists()


@pytest.mark.parametrize("name", ["rows.zip", "rows.tar", "rows.jsonl.bz2", "rows.jsonl.xz"])
def test_archives_are_not_unpacked(tmp_path: Path, name: str) -> None:
    magic = {"zip": b"PK\x03\x04", "tar": b"rows", "bz2": b"BZh9", "xz": b"\xfd7zXZ\x00"}[name.rpartition(".")[2]]
    path = tmp_path / name
    path.write_bytes(magic + os.urandom(64))
    with pytest.raises(InputDataError, match=name):
        make_plan(JobSpec(input=(str(path),)))
