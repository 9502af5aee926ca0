"""`run --extend`: new input files are added to a job, finished or not, and nothing that is there changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

import batchjob
from batchjob.report.result import RunResult
from batchjob.store import job_status, merge

Write = Callable[[Path, Iterable[Any]], Path]


def rows_of(output: Path) -> list[dict[str, Any]]:
    paths = sorted((output / "data").iterdir())
    return [row for path in paths for row in pyarrow.parquet.read_table(path).to_pylist()]


def parts_of(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (output / "data").iterdir()}


class Nightly:
    """A directory of input files that grows, and the job over it."""

    def __init__(self, root: Path, write: Write) -> None:
        self.input, self.output = root / "in", root / "out"
        self.input.mkdir()
        self.write = write
        self.lines: list[str] = []

    def add(self, name: str, rows: Iterable[Any]) -> Path:
        return self.write(self.input / name, rows)

    def run(self, *, extend: bool = True, **settings: Any) -> RunResult:
        self.lines = []
        values = {"engine": "fake", "progress": "none", "chunk_rows": 8, **settings}
        spec = batchjob.JobSpec(input=(str(self.input),), output=str(self.output), extend=extend, **values)
        return batchjob.run(spec, echo=self.lines.append)

    def answers(self) -> list[tuple[int, str]]:
        return [(row["row_index"], row["prompt"]) for row in rows_of(self.output)]


@pytest.fixture
def nightly(tmp_path: Path, write_jsonl: Write) -> Nightly:
    job = Nightly(tmp_path, write_jsonl)
    job.add("b.jsonl", [{"prompt": f"first {i}", "n": i} for i in range(20)])
    return job


def test_new_files_come_behind_and_old_parts_stay_as_they_are(nightly: Nightly) -> None:
    assert nightly.run().job_complete, "without a job --extend makes one"
    before = parts_of(nightly.output)
    nightly.add("c.jsonl", [{"prompt": f"second {i}", "n": i} for i in range(10)])
    result = nightly.run()
    assert (result.exit_code, result.rows_total, result.rows_done, result.rows_reused) == (0, 30, 30, 20)
    assert result.job_complete
    assert any("added 10 rows of 1 new file in 2 chunks" in line for line in nightly.lines)
    nightly.add("a.jsonl", [{"prompt": f"third {i}", "n": i} for i in range(3)])  # sorts before the others
    assert nightly.run().rows_done == 33
    after = parts_of(nightly.output)
    assert before.items() <= after.items(), "old parts are byte-identical"
    expected = [f"{name} {i}" for name, count in (("first", 20), ("second", 10), ("third", 3)) for i in range(count)]
    assert nightly.answers() == list(enumerate(expected))


def test_again_without_new_files_is_nothing_to_do(nightly: Nightly) -> None:
    nightly.run()
    nightly.add("c.jsonl", [{"prompt": "more"}])
    nightly.run()
    before = parts_of(nightly.output)
    for extend in (True, False):
        result = nightly.run(extend=extend)
        assert "nothing to do: 21 of 21 rows" in result.render()
    assert parts_of(nightly.output) == before


def test_new_files_without_the_flag_are_refused_by_its_name(nightly: Nightly) -> None:
    nightly.run()
    new = nightly.add("c.jsonl", [{"prompt": "more"}])
    with pytest.raises(batchjob.InputMissingError, match="--extend adds it to the job") as caught:
        nightly.run(extend=False)
    assert caught.value.exit_code == 66
    assert str(new) in str(caught.value)


@pytest.mark.parametrize("change", ["appended", "removed"])
def test_a_changed_old_file_is_refused_with_the_flag_too(nightly: Nightly, change: str) -> None:
    nightly.run()
    old = nightly.input / "b.jsonl"
    nightly.add("c.jsonl", [{"prompt": "more"}])
    if change == "removed":
        old.unlink()
    else:
        old.write_text(old.read_text() + '{"prompt": "appended"}\n')
    with pytest.raises(batchjob.InputMissingError, match=r"b\.jsonl"):
        nightly.run()
    assert len(list((nightly.output / ".batchjob" / "plan").iterdir())) == 1


def test_a_changed_file_of_an_extension_is_refused(nightly: Nightly) -> None:
    nightly.run()
    new = nightly.add("c.jsonl", [{"prompt": "more"}])
    nightly.run()
    new.write_text('{"prompt": "other"}\n')
    with pytest.raises(batchjob.InputMissingError, match=r"c\.jsonl has changed"):
        nightly.run()


def test_other_settings_are_refused_before_anything_is_added(nightly: Nightly) -> None:
    nightly.run()
    nightly.add("c.jsonl", [{"prompt": "more"}])
    with pytest.raises(batchjob.ConfigMismatchError, match="max_tokens"):
        nightly.run(max_tokens=3)
    assert len(list((nightly.output / ".batchjob" / "plan").iterdir())) == 1


def test_a_job_that_is_not_finished_can_be_extended(nightly: Nightly) -> None:
    nightly.run(num_shards=2, shard_id=0)
    nightly.add("c.jsonl", [{"prompt": f"second {i}"} for i in range(10)])
    assert not nightly.run(num_shards=2, shard_id=1).job_complete
    assert nightly.run().job_complete
    assert [index for index, _ in nightly.answers()] == list(range(30))


def test_an_extended_job_that_stopped_before_the_end_is_not_done(nightly: Nightly) -> None:
    """`done.json` of the first job is still there when all parts of the second are: it must not count."""
    nightly.run()
    done = (nightly.output / ".batchjob" / "done.json").read_bytes()
    nightly.add("c.jsonl", [{"prompt": f"second {i}"} for i in range(10)])
    nightly.run()
    (nightly.output / ".batchjob" / "done.json").write_bytes(done)
    result = nightly.run()
    assert (result.num_ok, result.job_complete) == (30, True)
    assert json.loads((nightly.output / ".batchjob" / "done.json").read_text())["num_rows"] == 30


def test_chunks_of_an_extension_have_a_size_of_their_own(nightly: Nightly) -> None:
    nightly.run(chunk_rows=None)
    nightly.add("c.jsonl", [{"prompt": f"second {i}"} for i in range(64 * 128)])
    nightly.run(chunk_rows=None)
    assert job_status(nightly.output).num_chunks == 1 + 64


def test_status_and_merge_see_all(nightly: Nightly, tmp_path: Path) -> None:
    nightly.run()
    nightly.add("c.jsonl", [{"prompt": "second", "n": 1}])
    nightly.run()
    status = job_status(nightly.output)
    assert (status.num_rows, status.complete) == (21, True)
    assert merge(nightly.output, tmp_path / "all.jsonl") == 21
    last = json.loads((tmp_path / "all.jsonl").read_text().splitlines()[-1])
    assert (last["row_index"], last["prompt"], last["n"]) == (20, "second", 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "n": "five"}, "'n' is int64 in this job but string"),
        ({"prompt": "x", "n": 1.5}, "'n' is int64 in this job but double"),
        ({"prompt": "x", "n": [1]}, "'n' is int64 in this job but of mixed or nested type"),
        ({"text": "x", "n": 1}, "no column 'prompt'"),
        ({"prompt": "x", "params": {"max_tokens": 1}}, "a column 'params', which the job's first files did not have"),
        ({"prompt": "x", "messages": []}, "a column 'messages'"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_anything_is_added(
    nightly: Nightly, row: dict[str, Any], message: str
) -> None:
    nightly.run()
    nightly.add("c.jsonl", [row])
    with pytest.raises(batchjob.InputDataError, match=message) as caught:
        nightly.run()
    assert caught.value.exit_code == 65
    assert len(list((nightly.output / ".batchjob" / "plan").iterdir())) == 1
    (nightly.input / "c.jsonl").unlink()
    assert nightly.run().exit_code == 0


@pytest.mark.parametrize("row", [{"prompt": "x"}, {"prompt": "x", "n": None}, {"prompt": "x", "n": 1, "more": True}])
def test_missing_null_and_new_columns_fit(nightly: Nightly, row: dict[str, Any]) -> None:
    nightly.run()
    nightly.add("c.jsonl", [row])
    nightly.run()
    last = rows_of(nightly.output)[-1]
    assert (last["status"], last["n"]) == ("ok", row.get("n"))
    assert "more" not in last
    assert any("'more'" in line or " more are left out" in line for line in nightly.lines) == ("more" in row)


def test_a_column_of_json_takes_anything(nightly: Nightly, tmp_path: Path) -> None:
    nightly.add("b.jsonl", [{"prompt": "x", "n": [1, 2.0]}])
    nightly.run()
    nightly.add("c.jsonl", [{"prompt": "y", "n": 7}])
    nightly.run()
    merge(nightly.output, tmp_path / "all.jsonl")
    assert [json.loads(line)["n"] for line in (tmp_path / "all.jsonl").read_text().splitlines()] == [[1, 2.0], 7]


def test_an_empty_new_file_adds_no_part(nightly: Nightly) -> None:
    nightly.run()
    (nightly.input / "c.jsonl").write_text("")
    assert nightly.run().job_complete
    assert nightly.run(extend=False).job_complete
    nightly.add("d.jsonl", [{"prompt": "more"}])
    assert nightly.run().rows_done == 21


def test_a_job_without_rows_cannot_be_extended(nightly: Nightly) -> None:
    (nightly.input / "b.jsonl").write_text("")
    nightly.run()
    nightly.add("c.jsonl", [{"prompt": "more"}])
    with pytest.raises(batchjob.UsageError, match="a job without rows"):
        nightly.run()


def test_parquet_files_are_added_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()

    def write(name: str, table: pa.Table) -> None:
        pyarrow.parquet.write_table(table, tmp_path / "in" / name)

    def run() -> RunResult:
        spec = batchjob.JobSpec(
            input=(str(tmp_path / "in"),), output=str(tmp_path / "out"), engine="fake", progress="none", extend=True
        )
        return batchjob.run(spec, echo=lambda line: None)

    write("a.parquet", pa.table({"prompt": ["a", "b"], "n": pa.array([1, 2], pa.uint8())}))
    run()
    write("b.parquet", pa.table({"n": pa.array([3], pa.uint8()), "prompt": ["c"]}))
    write("c.parquet", pa.table({"n": pa.nulls(1), "prompt": ["d"]}))
    assert run().rows_done == 4
    assert [row["n"] for row in rows_of(tmp_path / "out")] == [1, 2, 3, None]
    write("d.parquet", pa.table({"n": pa.array([3], pa.int64()), "prompt": ["c"]}))
    with pytest.raises(batchjob.InputDataError, match="'n' is uint8 in this job but int64"):
        run()


def test_extend_and_limit_exclude_each_other() -> None:
    with pytest.raises(batchjob.UsageError, match="--extend and --limit"):
        batchjob.JobSpec(extend=True, limit=5)


def test_eight_processes_extend_at_once(nightly: Nightly) -> None:
    nightly.run()
    for number in range(5):
        nightly.add(f"c{number}.jsonl", [{"prompt": f"{number} {i}"} for i in range(20)])
    flags = ["run", "--engine", "fake", "--input", str(nightly.input), "--output", str(nightly.output)]
    flags += ["--chunk-rows", "8", "--extend", "--num-shards", "8"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "batchjob", *flags, "--shard-id", str(i)], stderr=subprocess.PIPE, text=True
        )
        for i in range(8)
    ]
    for process in processes:
        _, printed = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        assert "may confuse readers" not in printed
    assert [index for index, _ in nightly.answers()] == list(range(120))
    assert sorted(path.name for path in (nightly.output / ".batchjob" / "plan").iterdir()) == [
        "00000.arrow",
        "00001.arrow",
    ]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_moved_input_is_known_by_its_content(tmp_path: Path, write_jsonl: Write, ending: str) -> None:
    def write(path: Path, first: int) -> None:
        rows = [{"prompt": f"row {first + i:05d} {'x' * 200}"} for i in range(40)]
        if ending == "jsonl":
            write_jsonl(path, rows)
        else:
            pa.parquet.write_table(pa.Table.from_pylist(rows), path, compression="none")

    def run(pattern: str) -> list[str]:
        lines: list[str] = []
        values: dict[str, Any] = {"engine": "fake", "progress": "none", "chunk_rows": 8, "max_tokens": 4}
        spec = batchjob.JobSpec(input=(str(tmp_path / pattern),), output=str(tmp_path / "out"), **values)
        assert batchjob.run(spec, echo=lines.append).job_complete
        return lines

    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / f"a.{ending}", 0)
    write(tmp_path / "in" / f"b.{ending}", 100)
    run("in")
    before = rows_of(tmp_path / "out")
    (tmp_path / "in").rename(tmp_path / "moved")
    (tmp_path / "moved" / f"a.{ending}").rename(tmp_path / "moved" / f"z.{ending}")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    for pattern in ("moved", "link"):
        part = sorted((tmp_path / "out" / "data").iterdir())[3]
        part.unlink()
        assert any("in place of" in line and "1 file more" in line for line in run(pattern))
        assert rows_of(tmp_path / "out") == before
    write(tmp_path / "moved" / f"z.{ending}", 500)  # of the same size
    with pytest.raises(batchjob.errors.InputMissingError, match="by its new path"):
        run("moved")


def test_what_was_computed_from_a_changed_file_is_not_kept(
    tmp_path: Path, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inline_feeder import InlineFeeder

    from batchjob.inputs import digests

    monkeypatch.setattr("batchjob.prompts.feeder.Feeder", InlineFeeder)
    monkeypatch.setattr(digests, "_MAX_HELD", 1000)  # rows go on before the end of their chunk is known
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"row {i:05d} {'x' * 300}"} for i in range(2000)])
    values: dict[str, Any] = {"engine": "fake", "progress": "none", "chunk_rows": 1000, "max_tokens": 4, "limit": 1900}
    spec = batchjob.JobSpec(input=(str(source),), output=str(tmp_path / "out"), max_num_seqs=1, **values)
    old = source.read_text()
    batchjob.run(spec, echo=lambda line: None)
    (tmp_path / "out" / "data" / "part-00000000.parquet").unlink()
    stat = source.stat()
    source.write_text(old.replace("row 00500", "ROW 00500"))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    monkeypatch.setattr("batchjob.job.extend._change_warning", lambda *given: None)  # as if it changed a moment later
    with pytest.raises(batchjob.errors.InputMissingError, match="rows 1 to 1,000"):
        batchjob.run(spec, echo=lambda line: None)
    assert not list((tmp_path / "out" / ".batchjob" / "wal").rglob("*.log"))
    source.write_text(old)
    result = batchjob.run(spec, echo=lambda line: None)
    assert (result.job_complete, result.rows_reused) == (True, 900)
    assert [row["prompt"] for row in rows_of(tmp_path / "out")] == [
        json.loads(line)["prompt"] for line in old.splitlines()
    ][:1900]


def test_rows_that_hold_another_type_than_the_folders_of_the_job_are_refused_at_once(nightly: Nightly) -> None:
    (nightly.input / "b.jsonl").unlink()
    for folder, rows in (("lang=de", [{"prompt": "old"}] * 3), ("lang=5", [{"prompt": "new", "lang": 7}] * 3)):
        (nightly.input / folder).mkdir()
        if folder == "lang=de":
            nightly.add(f"{folder}/a.jsonl", rows)
            assert nightly.run().job_complete
        else:
            nightly.add(f"{folder}/b.jsonl", rows)
    with pytest.raises(batchjob.InputDataError, match="column 'lang' is string in this job but not in all rows"):
        nightly.run()
    (nightly.input / "lang=5" / "b.jsonl").unlink()
    assert nightly.run().job_complete, "nothing of what was refused is left in the job"


def test_a_limited_job_compares_its_rows_with_its_own_limit_of_their_size(nightly: Nightly) -> None:
    nightly.add("b.jsonl", [{"prompt": "x" * 5000}, {"prompt": "short"}, {"prompt": "third"}])
    settings: dict[str, Any] = {"extend": False, "limit": 2, "max_row_bytes": 1000, "max_error_rate": 1.0}
    assert nightly.run(**settings).job_complete
    os.utime(nightly.input / "b.jsonl")
    assert nightly.run(**settings).job_complete


def test_a_file_that_an_earlier_version_read_under_two_names_still_is(nightly: Nightly) -> None:
    from batchjob.job.extend import _second_names

    os.link(nightly.input / "b.jsonl", nightly.input / "c.jsonl")
    planned = [str(nightly.input / name) for name in ("b.jsonl", "c.jsonl")]
    assert _second_names(planned, planned[:1]) == {planned[1]}
    assert _second_names([*planned, "/gone"], planned[:1]) == {planned[1]}
