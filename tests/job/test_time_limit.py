"""The time a process has: what it is told, when it stops letting rows in, and that what it began is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import batchjob
from batchjob.engine.fake import FakeRunner
from batchjob.errors import UsageError
from batchjob.job.time_limit import DEFAULT_DRAIN, Pace, TimeLimit, parse_duration

Write = Callable[[Path, Iterable[Any]], Path]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("3h30m", 12600), ("2d", 172800), ("45s", 45), ("12:00:00", 43200), ("1-00:00:30", 86430)],
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "3:30", "soon", "1h 5m", "-5m", "0s", "5m3h", "1:60:00"])
def test_a_time_that_could_mean_two_things_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--time-limit must be a time"):
        parse_duration(text)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_without_a_limit_nothing_is_too_late() -> None:
    limit = TimeLimit()
    assert not limit.is_too_late(1e9)
    assert limit.drain_seconds() == DEFAULT_DRAIN


def test_rows_stop_coming_in_when_the_next_would_not_be_finished() -> None:
    clock = Clock()
    limit = TimeLimit(3600.0, clock=clock)
    assert limit.last_moment == 1000 + 3600 - 60
    clock.now += 3400
    assert not limit.is_too_late(100)
    assert limit.is_too_late(140)
    clock.now += 141
    assert limit.is_too_late(0)


def test_a_drain_takes_what_is_left_but_for_the_reserve() -> None:
    clock = Clock()
    limit = TimeLimit(3600.0, clock=clock)
    clock.now += 3300
    assert limit.drain_seconds() == 240
    clock.now += 220  # 80 s left: the reserve would leave too little to be of use
    assert limit.drain_seconds() == 40
    clock.now += 1000
    assert limit.drain_seconds() == 0


def test_a_short_limit_has_a_short_reserve() -> None:
    clock = Clock()
    assert TimeLimit(60.0, clock=clock).last_moment == 1054


def test_the_scheduler_is_asked_again_before_work_ends() -> None:
    clock = Clock()
    answers = [1000.0, 5000.0, None]
    limit = TimeLimit(ask=lambda: answers.pop(0), clock=clock)
    assert len(answers) == 3, "nobody is asked before the job begins"
    limit.begin()
    clock.now += 990
    assert not limit.is_too_late(0), "the limit was raised meanwhile"
    assert answers == [None]
    clock.now += 4990
    assert limit.is_too_late(0), "no answer: what was known last holds"


def test_a_scheduler_that_does_not_answer_sets_no_limit() -> None:
    limit = TimeLimit(ask=lambda: None)
    limit.begin()
    assert limit.last_moment == float("inf")


def test_the_pace_is_that_of_the_typical_row() -> None:
    pace = Pace()
    assert pace.row_seconds() == 0
    for _ in range(400):
        pace.step(0.1)
    for num_tokens in (10, 20, 5000):
        pace.finished(num_tokens)
    assert pace.row_seconds() == pytest.approx(2.0)


@pytest.fixture
def num_sampled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slows the fake engine to 20 steps a second, and gets the number of tokens made in each."""
    made: list[int] = []
    init, execute = FakeRunner.__init__, FakeRunner.execute

    def counted(self: FakeRunner, plan: Any) -> Any:
        made.append(len(plan.sampled))
        return execute(self, plan)

    monkeypatch.setattr(FakeRunner, "__init__", lambda self, *a, **k: init(self, *a, **{**k, "step_seconds": 0.05}))
    monkeypatch.setattr(FakeRunner, "execute", counted)
    return made


@pytest.mark.usefixtures("num_sampled")
@pytest.mark.parametrize(("steps_per_launch", "ahead"), [(1, "off"), (4, "off"), (1, "on")])
def test_the_pace_is_that_of_a_step_however_many_are_started_at_once(
    steps_per_launch: int, ahead: str, tmp_path: Path, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake engine takes 50 ms for each launch, and runs a launch before it returns."""
    seconds: list[float] = []
    monkeypatch.setattr(Pace, "step", lambda self, step_seconds: seconds.append(step_seconds))
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "row"}])
    spec = batchjob.JobSpec(
        engine="fake",
        input=(str(source),),
        output=str(tmp_path / "out"),
        max_tokens=9,
        ignore_eos=True,
        decode_steps_per_launch=steps_per_launch,
        async_scheduling=ahead,
        progress="none",
    )
    assert batchjob.run(spec, echo=lambda line: None).exit_code == 0
    launch = sorted(seconds)[len(seconds) // 2]  # a prompt, and 8 steps in launches
    assert 0.05 / steps_per_launch <= launch < 0.1 / steps_per_launch


def test_a_run_ends_in_time_with_nothing_begun_in_vain(
    tmp_path: Path, write_jsonl: Write, num_sampled: list[int]
) -> None:
    """Rows of 20 tokens take a second; the limit of 4 s leaves 3.6 s."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(400)])
    spec = batchjob.JobSpec(
        engine="fake",
        input=(str(source),),
        output=str(tmp_path / "out"),
        max_tokens=20,
        ignore_eos=True,
        max_num_seqs=4,
        time_limit="4s",
        progress="none",
    )
    started = time.monotonic()
    result = batchjob.run(spec)
    assert time.monotonic() - started < 5.5
    assert (result.exit_code, result.stopped_by) == (75, "time limit")
    assert result.rows_done >= 4
    assert sum(num_sampled) == 20 * result.rows_done, "a row was begun that was not finished"


def test_planning_counts_towards_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchjob.inputs import planner

    make_plan = planner.make_plan

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(1.1)
        return make_plan(*arguments, **options)

    monkeypatch.setattr(planner, "make_plan", slow)
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text('{"prompt": "a b"}\n' * 10)
    spec = batchjob.JobSpec(engine="fake", input=(str(source),), output=str(output), time_limit="1s", progress="none")
    result = batchjob.run(spec, echo=lambda line: None)
    assert (result.exit_code, result.stopped_by, result.rows_done) == (75, "time limit", 0)
