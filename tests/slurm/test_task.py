"""The identity of a task, and its calls of SLURM's programs: with stand-ins for those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from batchjob.slurm import SlurmTask, after_stop
from batchjob.slurm.requeue import MAX_FRUITLESS
from batchjob.slurm.task import parse_time_left
from batchjob.slurm.tools import SlurmToolError, call

ARRAY_TASK = {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("environ", "task"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, SlurmTask("12")),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "4"}, SlurmTask("12", 4)),
        # The last task of an array has the array's own id: to requeue by that would start all tasks again.
        (ARRAY_TASK, SlurmTask("70_3")),
        ({**ARRAY_TASK, "SLURM_ARRAY_TASK_ID": ""}, None),
        ({"SLURM_JOB_ID": "12; rm -rf /"}, None),
        ({"SLURM_JOB_ID": "--all"}, None),
        ({"SLURM_JOB_ID": "१२"}, None),  # digits, but not SLURM's
        ({**ARRAY_TASK, "SLURM_ARRAY_TASK_ID": "3,4"}, None),
        ({"SLURM_JOB_ID": "9" * 40}, None),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "many"}, SlurmTask("12", 0)),
    ],
)
def test_the_task_is_known_from_the_environment(environ: dict[str, str], task: SlurmTask | None) -> None:
    assert SlurmTask.from_environ(environ) == task


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4:59\n", 299),
        ("0:00", 0),
        ("1:00:05", 3605),
        ("2-03:04:05", 2 * 86400 + 3 * 3600 + 245),
        ("UNLIMITED", float("inf")),
        ("364-23:59:58", float("inf")),
    ],
)
def test_the_time_left_as_squeue_prints_it(text: str, seconds: float) -> None:
    assert parse_time_left(text) == seconds


@pytest.mark.parametrize("text", ["", "INVALID", "NOT_SET", "12", "1:2:3:4", "a:b", "-1:00", "1:00\n2:00"])
def test_what_is_no_time_left_is_refused(text: str) -> None:
    with pytest.raises(SlurmToolError, match="time left"):
        parse_time_left(text)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """`stand_in(name, body)`: a program first on PATH that writes down its arguments. Returns the file of calls."""
    called = tmp_path / "called"

    def make(name: str, body: str = "true") -> Path:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {called}\n{body}\n')
        program.chmod(0o755)
        return called

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return make


def test_a_task_asks_by_its_own_name(stand_in: Callable[..., Path]) -> None:
    stand_in("scontrol")
    called = stand_in("squeue", "echo 12:00")
    task = SlurmTask("70_3")
    assert task.seconds_left() == 720
    task.requeue()
    assert called.read_text() == "squeue --noheader --jobs 70_3 --format %L\nscontrol requeue 70_3\n"


def test_a_call_that_fails_says_what_the_program_said(stand_in: Callable[..., Path]) -> None:
    stand_in("scontrol", "echo 'Job is  pending' >&2; exit 3")
    with pytest.raises(SlurmToolError, match=r"^scontrol failed with code 3: Job is pending$"):
        SlurmTask("5").requeue()
    with pytest.raises(SlurmToolError, match="cannot be started"):
        call(["no-such-program-of-slurm"])


def test_a_call_does_not_wait_for_ever(stand_in: Callable[..., Path]) -> None:
    stand_in("squeue", "exec sleep 20")
    with pytest.raises(SlurmToolError, match=r"did not answer in 0\.2 s"):
        call(["squeue"], timeout=0.2)


# -- when it is no longer worth asking


@pytest.mark.parametrize("mode", ["scontrol", "exit"])
def test_ten_requeues_without_a_row_are_enough(mode: str, tmp_path: Path, stand_in: Callable[..., Path]) -> None:
    called = stand_in("scontrol")
    called.write_text("")
    task, other = SlurmTask("70_3"), SlurmTask("70_2")
    for _ in range(MAX_FRUITLESS):
        assert not after_stop(mode, task, notes=tmp_path / "requeues", made_progress=False).gave_up
    assert called.read_text().count("requeue 70_3") == (MAX_FRUITLESS if mode == "scontrol" else 0)
    called.write_text("")
    last = after_stop(mode, task, notes=tmp_path / "requeues", made_progress=False)
    assert last.gave_up
    assert "10 requeues of task 70_3 in a row finished no row" in last.message
    assert not called.read_text()
    assert not after_stop(mode, other, notes=tmp_path / "requeues", made_progress=False).gave_up
    assert not after_stop("none", task, notes=tmp_path / "requeues", made_progress=False).gave_up


def test_a_finished_row_begins_the_count_anew(tmp_path: Path) -> None:
    task = SlurmTask("70_3")
    for made_progress in [*[False] * MAX_FRUITLESS, True, *[False] * MAX_FRUITLESS]:
        assert not after_stop("exit", task, notes=tmp_path, made_progress=made_progress).gave_up
    assert after_stop("exit", task, notes=tmp_path, made_progress=False).gave_up


def test_a_count_that_cannot_be_read_or_written_ends_nothing(tmp_path: Path) -> None:
    task = SlurmTask("70_3")
    (tmp_path / "70_3").write_text("many")
    assert not after_stop("exit", task, notes=tmp_path, made_progress=False).gave_up
    (tmp_path / "file").write_text("")
    assert not after_stop("exit", task, notes=tmp_path / "file", made_progress=False).gave_up


def test_a_requeue_that_fails_is_told_and_no_more(tmp_path: Path, stand_in: Callable[..., Path]) -> None:
    stand_in("scontrol", "exit 1")
    order: list[str] = []
    result = after_stop(
        "scontrol",
        SlurmTask("5"),
        notes=tmp_path,
        made_progress=True,
        before_call=lambda: order.append("term ignored"),
    )
    assert "submit it again" in result.message
    assert not result.gave_up
    assert order == ["term ignored"]


def test_outside_slurm_nothing_is_asked(tmp_path: Path, stand_in: Callable[..., Path]) -> None:
    called = stand_in("scontrol")
    assert not after_stop("scontrol", None, notes=tmp_path, made_progress=True).message
    assert not called.exists()
