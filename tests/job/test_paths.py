"""Odd paths: a control character is refused, every other one comes back in commands that a shell takes."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import pytest

from batchjob.errors import StorageError, UsageError
from batchjob.inputs.duplicates import DuplicateFinder
from batchjob.job.observer import RestartHints, Team
from batchjob.report.result import RunResult
from batchjob.spec import JobSpec
from batchjob.supervisor import worker_process as process


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x1b[31m", "a\x00b", "a\u2028b", "a\x85b"])
def test_an_output_with_a_control_character_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"--output .* has a control character"):
        JobSpec(input=("x.jsonl",), output=f"/tmp/{name}", engine="fake")


@pytest.mark.parametrize("name", ["plain", "it's", 'a "b"', "$(touch x)", "a`b`", "ünï \U0001f600", "back\\slash"])
def test_the_closing_lines_quote_the_output(name: str) -> None:
    lines = RunResult(output=f"/tmp/{name}", rows_total=1, rows_done=1, job_complete=True).render().split("\n")
    (merge,) = (shlex.split(line) for line in lines if "batchjob merge" in line)
    assert merge[-3:] == ["merge", f"/tmp/{name}", "answers.jsonl"]
    (read,) = (shlex.split(line)[-1] for line in lines if "read it" in line)
    found: list[str] = []
    code = read.partition("print(")[2].replace("pq.read_table(", "found.append(").partition(".slice")[0]
    exec(code, {"found": found})
    assert found == [f"/tmp/{name}/data"]


def test_without_a_place_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with DuplicateFinder(in_memory=1) as finder, pytest.raises(StorageError, match="TMPDIR"):
        finder.add("1", "row 1")
    monkeypatch.setattr(process, "WORKER", ("true",))
    worker = process.WorkerProcess(
        JobSpec(input=("x.jsonl",), output="o", engine="fake"), RestartHints(), Team("a", 0, 1, JobSpec()), debug=False
    )
    worker.wait(10)
    assert worker.stacks() == ""
    worker.close()
