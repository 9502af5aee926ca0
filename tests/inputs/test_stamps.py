"""A file that was touched, and one that has changed since it was planned."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.errors import InputMissingError
from batchjob.inputs.planner import PlanResult
from batchjob.inputs.stamps import check_unchanged

Write = Callable[[str, bytes], Path]
PlanOf = Callable[..., PlanResult]
ROW = b'{"prompt": "x"}\n'


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_touch_is_a_warning_and_a_change_is_exit_66(write: Write, tmp_path: Path, plan_of: PlanOf, name: str) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"prompt": ["x"] * 1000}), path)
    else:
        write(name, ROW * 1000)
    (file,) = plan_of(path).plan.files
    assert check_unchanged(file) is None
    os.utime(path, ns=(1, 1))
    assert "modification time" in (check_unchanged(file) or "")
    data = path.read_bytes()
    path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    with pytest.raises(InputMissingError, match="same size"):
        check_unchanged(file)
    path.write_bytes(data + b"\n")
    with pytest.raises(InputMissingError, match="has changed"):
        check_unchanged(file)
    path.unlink()
    with pytest.raises(InputMissingError, match="gone"):
        check_unchanged(file)


def test_a_changed_byte_in_the_middle_of_a_large_file_is_seen(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(ROW * 30_000)
    (file,) = plan_of(path).plan.files
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(InputMissingError):
        check_unchanged(file)
