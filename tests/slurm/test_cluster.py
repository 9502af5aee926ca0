"""The program under a real SLURM: warnings, requeues, kills, preemption, time limits. Each job runs the scripts that
`batchjob slurm` wrote for it, with the fake engine slowed down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from batchjob.launch.slurm_scripts import Scripts

Write = Callable[[Path, Iterable[Any]], Path]
NUM_ROWS = 240

# Imported by every Python that finds it on its path. Each task takes STEP_SECONDS per step, or STEP_SECONDS_<task>.
SLOW_ENGINE = """
import os
task = os.environ.get("SLURM_ARRAY_TASK_ID")
seconds = os.environ.get(f"STEP_SECONDS_{task}") or os.environ.get("STEP_SECONDS")
if task and seconds:
    from batchjob.engine.fake import FakeRunner
    init = FakeRunner.__init__
    FakeRunner.__init__ = lambda self, *a, **k: init(self, *a, **{**k, "step_seconds": float(seconds)})
"""


class Job:
    """A job of NUM_ROWS rows in chunks of 10, and what can be seen of it from outside."""

    def __init__(self, cluster: Any, directory: Path, write_jsonl: Write) -> None:
        self.cluster = cluster
        self.directory = directory
        self.output = directory / "out"
        self.merged = directory / "all.jsonl"
        self.source = write_jsonl(directory / "in.jsonl", [{"prompt": f"row number {i}"} for i in range(NUM_ROWS)])
        (directory / "site").mkdir()
        (directory / "site" / "sitecustomize.py").write_text(SLOW_ENGINE)
        paths = [str(directory / "site"), os.environ.get("PYTHONPATH", "")]
        self.env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.flags = {
            "engine": "fake",
            "input": (str(self.source),),
            "output": str(self.output),
            "chunk_rows": 10,
            "max_num_seqs": 4,
        }

    def write(self, run_cli: Any, num_tasks: int, *more: str) -> str:
        """Plans the job and writes its scripts; returns what was printed."""
        flags = [f"--{name.replace('_', '-')}={v[0] if isinstance(v, tuple) else v}" for name, v in self.flags.items()]
        env = {**self.cluster.env, **self.env}
        arguments = ["--array", str(num_tasks), "--merge", str(self.merged), *more]
        return run_cli("slurm", *flags, *arguments, env=env, cwd=self.directory).stderr

    def sbatch(self, *arguments: str | Path, step_seconds: float = 0.0, **tasks: float) -> str:
        steps = {f"STEP_SECONDS_{name.removeprefix('task_')}": str(seconds) for name, seconds in tasks.items()}
        env = {**self.env, "STEP_SECONDS": str(step_seconds), **steps}
        return self.cluster.sbatch(f"--chdir={self.directory}", *arguments, env=env)

    @property
    def array(self) -> Path:
        return self.directory / "slurm" / "array.sbatch"

    @property
    def merge(self) -> Path:
        return self.directory / "slurm" / "merge.sbatch"

    def log(self, array: str, task: int) -> str:
        path = self.directory / "slurm" / "logs" / f"batchjob-{array}_{task}.out"
        return path.read_text() if path.exists() else ""

    def attempts(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.output / ".batchjob" / "attempts").glob("*.json")):
            try:
                record = json.loads(path.read_text())
            except ValueError:
                continue
            if record.get("slurm"):  # planning the job leaves a record too
                found.append(record)
        return found

    def batch_process(self, name: str) -> int:
        """Its process id: the supervisor, whose worker has written the record."""
        worker = next(a["pid"] for a in self.attempts() if a["slurm"]["task"] == name)
        return int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])

    def is_working(self, name: str, restart: int = 0) -> bool:
        """True if this start of a task has finished rows that are not in a part yet."""
        for path in (self.output / ".batchjob" / "wal").glob("*/*.log"):
            try:
                attempt = path.name.partition(".")[0]
                record = json.loads((self.output / ".batchjob" / "attempts" / f"{attempt}.json").read_text())
            except (OSError, ValueError):
                continue
            if record.get("slurm") == {"task": name, "restart": restart}:
                return True
        return False

    def wait_until_working(self, name: str, restart: int = 0) -> None:
        what = f"{name} to finish rows (start {restart})"
        self.cluster.wait(lambda: self.is_working(name, restart), what)

    def rows(self) -> list[int]:
        paths = sorted((self.output / "data").iterdir())
        return [index for path in paths for index in pyarrow.parquet.read_table(path)["row_index"].to_pylist()]

    def is_complete(self) -> bool:
        return self.rows() == list(range(NUM_ROWS))

    def warn(self, name: str) -> None:
        """Does what SLURM does when the end of a task comes near."""
        self.cluster.call("scancel", "--signal=USR1", "--batch", name)

    def restarts(self, name: str) -> int:
        return int(self.cluster.job(name)["Restarts"])

    def wait_for_restart(self, name: str) -> None:
        self.cluster.wait(lambda: self.restarts(name) == 1, f"{name} to be requeued")
        self.cluster.start_now(name)


@pytest.fixture
def job(cluster: Any, tmp_path: Path, write_jsonl: Write) -> Job:
    directory = tmp_path / "a 100% job"  # a blank and a percent sign mean something to SLURM
    directory.mkdir()
    return Job(cluster, directory, write_jsonl)


def test_an_array_with_warnings_requeues_and_a_kill_then_a_merge(cluster: Any, job: Job, run_cli: Any) -> None:
    job.write(run_cli, 4)
    array = job.sbatch(job.array, step_seconds=0.08)
    merge = job.sbatch(f"--dependency=afterany:{array}", job.merge)
    tasks = [f"{array}_{task}" for task in range(4)]
    for task in tasks:
        job.wait_until_working(task)
    job.warn(tasks[0])
    cluster.call("scontrol", "requeue", tasks[1])  # by another user: the task only gets SIGTERM
    os.kill(job.batch_process(tasks[2]), signal.SIGKILL)
    job.warn(tasks[3])
    cluster.wait_for_state(tasks[2], "FAILED", "NODE_FAIL")
    cluster.call("scontrol", "requeue", tasks[2])  # as after a node failure
    for task in tasks:
        job.wait_for_restart(task)
    cluster.wait_for_state(merge, "COMPLETED", "FAILED", seconds=90)
    assert [cluster.state(task) for task in tasks] == ["COMPLETED"] * 4, job.log(array, 0)
    assert [job.restarts(task) for task in tasks] == [1] * 4
    assert job.is_complete()
    assert [json.loads(line)["row_index"] for line in job.merged.read_text().splitlines()] == list(range(NUM_ROWS))
    for task in (0, 3):
        log = job.log(array, task)
        assert "stopped early (SIGUSR1)" in log, "a restart has emptied the log"
        assert f"task {array}_{task} is back in the queue" in log
        assert "done before)" in log
    assert "stopped early (SIGTERM)" in job.log(array, 1)
    assert "back in the queue" not in job.log(array, 1)


def test_the_last_task_requeues_itself_alone_then_subsets_and_a_second_submission(
    cluster: Any, job: Job, run_cli: Any
) -> None:
    job.write(run_cli, 4)
    # Some of the tasks only: the chunks of the others stay open.
    array = job.sbatch("--array=1,3", job.array, task_3=0.1)
    last = f"{array}_3"
    cluster.wait_for_state(f"{array}_1", "COMPLETED")
    job.wait_until_working(last)
    assert cluster.job(last)["JobId"] == array, "the case this is about: the last task has the array's own id"
    job.warn(last)
    job.wait_for_restart(last)
    cluster.wait_for_state(last, "COMPLETED")
    assert (cluster.state(f"{array}_1"), job.restarts(f"{array}_1")) == ("COMPLETED", 0)
    assert {index // 10 % 4 for index in job.rows()} == {1, 3}
    assert len(job.rows()) == NUM_ROWS // 2
    run_cli("status", job.output, code=75)
    # A merge that waits for them refuses, and says why.
    merge = job.sbatch(job.merge)
    cluster.wait_for_state(merge, "FAILED")
    assert cluster.job(merge)["ExitCode"] == "75:0"

    array = job.sbatch("--array=0,2", job.array)
    for task in (0, 2):
        cluster.wait_for_state(f"{array}_{task}", "COMPLETED")
    assert job.is_complete()

    # All of it again: nothing is done, and quickly.
    attempts = job.attempts()
    array = job.sbatch(job.array)
    for task in range(4):
        cluster.wait_for_state(f"{array}_{task}", "COMPLETED")
        assert "nothing to do: 60 of 60 rows" in job.log(array, task)
    assert job.attempts() == attempts
    started = time.monotonic()
    run_cli("run", *[f"--{n.replace('_', '-')}={v[0] if isinstance(v, tuple) else v}" for n, v in job.flags.items()])
    assert time.monotonic() - started < 2


def test_a_task_that_is_preempted_comes_back(cluster: Any, job: Job, run_cli: Any) -> None:
    printed = job.write(run_cli, 1, "--partition=low", "--sbatch=--cpus-per-task=8")
    assert "KillWait is 5 s" in printed
    array = job.sbatch(job.array, step_seconds=0.04)
    task = f"{array}_0"
    job.wait_until_working(task)
    urgent = cluster.sbatch("--partition=high", "--cpus-per-task=8", "--output=/dev/null", "--wrap", "sleep 1")
    cluster.wait_for_state(urgent, "COMPLETED")
    cluster.wait(lambda: job.restarts(task) >= 1, "the task to be requeued")
    cluster.start_now(task)
    cluster.wait_for_state(task, "COMPLETED")
    assert job.restarts(task) == 1, "requeued once, though both SLURM and the task asked for it"
    assert job.is_complete()
    assert "stopped early (SIGUSR1)" in job.log(array, 0)


def test_a_cancelled_task_does_not_come_back(cluster: Any, job: Job, run_cli: Any) -> None:
    job.write(run_cli, 2)
    array = job.sbatch("--array=0", job.array, step_seconds=0.1)
    task = f"{array}_0"
    job.wait_until_working(task)
    cluster.call("scancel", task)
    cluster.wait_for_state(task, "CANCELLED")
    cluster.wait(lambda: "stopped early (SIGTERM)" in job.log(array, 0), "its last words")
    assert "back in the queue" not in job.log(array, 0)
    assert job.restarts(task) == 0


def test_eight_tasks_that_start_at_once_on_an_empty_output(cluster: Any, job: Job) -> None:
    """Without the plan that `batchjob slurm` makes: each of them plans, and one of the plans becomes the job's."""
    scripts = Scripts(
        output=str(job.output),
        flags=job.flags,
        num_tasks=8,
        program=(sys.executable, "-m", "batchjob"),
        directory=str(job.directory),
        logs=str(job.directory / "slurm" / "logs"),
    )
    scripts.write(job.directory / "slurm")
    array = job.sbatch(job.array)
    for task in range(8):
        cluster.wait_for_state(f"{array}_{task}", "COMPLETED", "FAILED")
        assert cluster.state(f"{array}_{task}") == "COMPLETED", job.log(array, task)
    assert job.is_complete()
    assert len({attempt["slurm"]["task"] for attempt in job.attempts()}) == 8


@pytest.mark.long
def test_the_time_limit(cluster: Any, job: Job, run_cli: Any) -> None:
    """One task sees its end coming and goes back in the queue; one that is told to look at no clock is ended by SLURM,
    and its finished rows are there all the same."""
    job.write(run_cli, 2, "--time=1")
    text = job.array.read_text().replace("#SBATCH --signal", "# --signal")  # it could come at the very start
    job.array.write_text(text)
    blind = job.array.with_name("blind.sbatch")
    blind.write_text(text.replace(" run ", " run --time-limit=none --drain-timeout=3 "))
    steps = 0.8  # about 140 of them: too slow for one minute
    array = job.sbatch("--array=0", job.array, step_seconds=steps)
    other = job.sbatch("--array=1", blind, step_seconds=steps)
    seeing, unseeing = f"{array}_0", f"{other}_1"
    cluster.wait(lambda: job.restarts(seeing) == 1, "the task to go back in the queue", 90)
    assert "stopped early (time limit)" in job.log(array, 0)
    cluster.wait_for_state(unseeing, "TIMEOUT", seconds=90)
    assert "stopped early (SIGTERM)" in job.log(other, 1)
    ends = {attempt["shard"][0]: attempt["ended"] for attempt in job.attempts() if "ended" in attempt}
    assert [ends[shard]["by"] for shard in (0, 1)] == ["time limit", "SIGTERM"]
    assert all(end["rows_finished"] for end in ends.values())
    cluster.call("scancel", seeing)
    array = job.sbatch(job.array)
    for task in (0, 1):
        cluster.wait_for_state(f"{array}_{task}", "COMPLETED")
        num_reused = int(job.log(array, task).split(" done before)")[0].rsplit("(", 1)[1])
        assert num_reused >= ends[task]["rows_finished"]
    assert job.is_complete()


@pytest.mark.long
def test_a_node_that_fails_brings_its_tasks_back(cluster: Any, job: Job, run_cli: Any) -> None:
    job.write(run_cli, 2)
    array = job.sbatch(job.array, step_seconds=0.1)
    tasks = [f"{array}_{task}" for task in range(2)]
    for task in tasks:
        job.wait_until_working(task)
    node = cluster.job(tasks[0])["NodeList"]
    cluster.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        for task in tasks:
            cluster.wait(lambda task=task: job.restarts(task) == 1, f"{task} to be requeued")
    finally:
        # It may be back already: slurmd has registered again.
        cluster.call("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    for task in tasks:
        cluster.start_now(task)
        cluster.wait_for_state(task, "COMPLETED", seconds=90)
    assert job.is_complete()


@pytest.mark.long
def test_a_site_that_requeues_the_exit_code(cluster: Any, job: Job, run_cli: Any) -> None:
    """RequeueExit=75: the task only ends, and the merge behind the array waits for its second try."""
    cluster.configure("RequeueExit=75")
    try:
        assert "RequeueExit" not in job.write(run_cli, 2, "--requeue", "exit")
        array = job.sbatch(job.array, step_seconds=0.1)
        merge = job.sbatch(f"--dependency=afterany:{array}", job.merge)
        task = f"{array}_1"
        job.wait_until_working(task)
        job.warn(task)
        job.wait_for_restart(task)
        assert "back in the queue" not in job.log(array, 1)
        cluster.wait_for_state(merge, "COMPLETED", "FAILED", seconds=90)
        assert (cluster.state(merge), job.restarts(task), job.restarts(f"{array}_0")) == ("COMPLETED", 1, 0)
        assert job.is_complete()
        assert "RequeueExit lists 75" in job.write(run_cli, 2)
    finally:
        cluster.configure()


@pytest.mark.long
def test_a_task_whose_time_is_never_enough_stays_away_in_the_end(cluster: Any, job: Job, run_cli: Any) -> None:
    job.write(run_cli, 1, "--time-limit", "1s")  # over before the first row
    array = job.sbatch(job.array, step_seconds=2)
    task = f"{array}_0"
    for restart in range(10):
        cluster.wait(lambda restart=restart: job.restarts(task) == restart + 1, f"requeue {restart + 1}")
        cluster.start_now(task)
    cluster.wait_for_state(task, "FAILED")
    assert cluster.job(task)["ExitCode"] == "70:0"
    assert job.restarts(task) == 10
    assert "10 requeues of task" in job.log(array, 0)
