"""A job never reads its own answers, and those of others only where they are named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchjob
from batchjob.errors import InputDataError, InputMissingError, UsageError
from batchjob.inputs.find import find_inputs


def make_input(folder: Path, name: str = "a.parquet") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": ["one", "two", "three"]}), folder / name)
    return folder / name


def run(pattern: object, output: Path, *, extend: bool = False) -> tuple[batchjob.RunResult, list[str]]:
    lines: list[str] = []
    spec = batchjob.JobSpec(
        engine="fake", progress="none", max_tokens=4, input=(str(pattern),), output=str(output), extend=extend
    )
    return batchjob.run(spec, echo=lines.append), lines


@pytest.mark.parametrize("pattern", ["", "/**/*.parquet"])
def test_an_output_inside_the_input_is_never_read(tmp_path: Path, pattern: str) -> None:
    make_input(tmp_path / "in")
    for extend in (False, False, True, True):
        result, lines = run(f"{tmp_path / 'in'}{pattern}", tmp_path / "in" / "out", extend=extend)
        assert (result.exit_code, result.rows_total, result.rows_done) == (0, 3, 3)
    assert any("left out 1 file" in line for line in lines)


def test_links_to_answers_are_seen_through(tmp_path: Path) -> None:
    make_input(tmp_path / "in")
    run(tmp_path / "in", tmp_path / "out")
    part = next((tmp_path / "out" / "data").iterdir())
    (tmp_path / "in" / "b.parquet").symlink_to(part)
    for output in (tmp_path / "out", tmp_path / "other"):
        found, warnings = find_inputs([str(tmp_path / "in")], str(output))
        assert [Path(file.path).name for file in found] == ["a.parquet"]
        assert str(part.parent) in warnings[0]
    (tmp_path / "link").symlink_to(tmp_path / "out" / "data")
    with pytest.raises(UsageError, match="never its input"):
        find_inputs([str(tmp_path / "link")], str(tmp_path / "out"))


def test_a_copy_of_own_answers_is_refused(tmp_path: Path) -> None:
    make_input(tmp_path / "in")
    run(tmp_path / "in", tmp_path / "out")
    part = next((tmp_path / "out" / "data").iterdir())
    (tmp_path / "in" / "copy.parquet").write_bytes(part.read_bytes())
    with pytest.raises(InputDataError, match=r"copy\.parquet is a copy of answers of this very job"):
        run(tmp_path / "in", tmp_path / "out", extend=True)


def test_answers_of_another_job_are_read_where_they_are_named(tmp_path: Path) -> None:
    make_input(tmp_path / "in")
    run(tmp_path / "in", tmp_path / "in" / "first")
    data = tmp_path / "in" / "first" / "data"
    part = next(data.iterdir())
    for pattern in (data, part, data / "*.parquet"):
        assert [file.path for file in find_inputs([str(pattern)], str(tmp_path / "x"))[0]] == [str(part)]
    found, warnings = find_inputs([str(tmp_path / "in")], str(tmp_path / "x"))
    assert len(found) == 1
    assert "name that directory" in warnings[0]
    with pytest.raises(InputMissingError, match=f"--input {data}"):
        find_inputs([str(tmp_path / "in" / "first")], str(tmp_path / "x"))
