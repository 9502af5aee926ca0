"""`--save-partial`: a row that a stop cuts off keeps its tokens, and the next run continues after them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import batchjob
from batchjob.job.stop import StopSignals
from batchjob.records import Completion
from batchjob.report.result import RunResult
from batchjob.store import Store
from batchjob.store.paths import Layout

Write = Callable[[Path, Iterable[Any]], Path]


def rows_of(output: Path) -> list[dict[str, Any]]:
    paths = sorted((output / "data").iterdir())
    return [row for path in paths for row in pyarrow.parquet.read_table(path).to_pylist()]


def partials_in(output: Path) -> dict[tuple[int, int], list[int]]:
    found = {}
    for path in Layout(output).wal.glob("*/*.log"):
        for line in path.read_bytes().splitlines():
            record = json.loads(line[9:])
            if "partial" in record:
                found[record["row"], record["sample"]] = record["partial"]
    return found


class Stopped:
    """Runs a job that is told to stop, with no time to drain, at its n-th step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def run(self, at_step: int | None, **settings: Any) -> tuple[RunResult, int]:
        """The result, and the number of output tokens that were computed."""
        from batchjob.engine.engine import Engine

        values = {"progress": "none", "engine": "fake", **settings}
        spec = batchjob.JobSpec(**values)
        signals: list[StopSignals] = []
        num_steps = num_sampled = 0
        enter, step = StopSignals.__enter__, Engine.step

        def entered(self: StopSignals) -> StopSignals:
            signals.append(self)
            return enter(self)

        def stepped(self: Engine) -> list[Completion]:
            nonlocal num_steps, num_sampled
            done = step(self)
            num_steps, num_sampled = num_steps + 1, self.stats.num_sampled
            if num_steps == at_step:
                signals[0].request("test", time.monotonic())
            return done

        with self.monkeypatch.context() as patch:
            patch.setattr(StopSignals, "__enter__", entered)
            patch.setattr(Engine, "step", stepped)
            return batchjob.run(spec, echo=lambda line: None), num_sampled


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Stopped:
    return Stopped(monkeypatch)


@pytest.fixture
def job(tmp_path: Path, write_jsonl: Write) -> dict[str, Any]:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(8)])
    return {"input": (str(source),), "ignore_eos": True, "max_tokens": 200}


def test_a_long_row_goes_on_where_it_was_cut(job: dict[str, Any], tmp_path: Path, stopped: Stopped) -> None:
    whole, all_tokens = stopped.run(None, **job, output=str(tmp_path / "whole"))
    first, before = stopped.run(101, **job, output=str(tmp_path / "out"))
    assert (first.exit_code, first.rows_done, first.rows_saved) == (75, 0, 8)
    assert {key: len(ids) for key, ids in partials_in(tmp_path / "out").items()} == {(row, 0): 101 for row in range(8)}
    assert "8 unfinished rows" in first.render()
    second, after = stopped.run(None, **job, output=str(tmp_path / "out"))
    assert (second.exit_code, second.rows_continued, second.job_complete) == (0, 8, True)
    assert before + after == all_tokens == 8 * 200, "no token is computed twice"
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")
    assert second.output_tokens == after == whole.output_tokens - before


def test_cut_twice(job: dict[str, Any], tmp_path: Path, stopped: Stopped) -> None:
    stopped.run(None, **job, output=str(tmp_path / "whole"))
    computed = [stopped.run(at, **job, output=str(tmp_path / "out"))[1] for at in (70, 50, None)]
    assert computed == [8 * 70, 8 * 50, 8 * 80]
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")


@pytest.mark.parametrize(("save_partial", "kept"), [(0, 0), (50, 8), (51, 0)])
def test_only_above_a_length(
    job: dict[str, Any], tmp_path: Path, stopped: Stopped, save_partial: int, kept: int
) -> None:
    result, _ = stopped.run(50, **job, output=str(tmp_path / "out"), save_partial=save_partial)
    assert result.rows_saved == len(partials_in(tmp_path / "out")) == kept
    stopped.run(None, **job, output=str(tmp_path / "out"))
    assert [row["row_index"] for row in rows_of(tmp_path / "out")] == list(range(8))


def test_every_sample_has_its_own(job: dict[str, Any], tmp_path: Path, stopped: Stopped) -> None:
    job |= {"n": 3, "temperature": 1.0}
    stopped.run(None, **job, output=str(tmp_path / "whole"))
    stopped.run(90, **job, output=str(tmp_path / "out"))
    assert len(partials_in(tmp_path / "out")) == 24
    result, _ = stopped.run(None, **job, output=str(tmp_path / "out"))
    assert result.rows_continued == 24
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")


def test_preempted_rows_are_kept_too(job: dict[str, Any], tmp_path: Path, stopped: Stopped) -> None:
    """With room for half of the tokens, rows that wait for memory when the stop comes have tokens as well."""
    job |= {"kv_cache_memory": str(50 * 16 * 1024), "save_partial": 1}
    stopped.run(None, **job, output=str(tmp_path / "whole"))
    result, _ = stopped.run(150, **job, output=str(tmp_path / "out"))
    assert 0 < result.rows_saved + result.rows_done <= 8
    stopped.run(None, **job, output=str(tmp_path / "out"))
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")


def test_a_stop_string_may_lie_across_the_cut(tmp_path: Path, write_jsonl: Write, stopped: Stopped) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "row"}])
    job = {"input": (str(source),), "ignore_eos": True, "max_tokens": 20}
    stopped.run(None, **job, output=str(tmp_path / "free"))
    words = rows_of(tmp_path / "free")[0]["output"].split()
    job["stop"] = (" ".join(words[8:11]),)
    stopped.run(None, **job, output=str(tmp_path / "whole"))
    whole = rows_of(tmp_path / "whole")
    assert whole[0]["finish_reason"] == "stop"
    for cut in range(1, 11):
        output = tmp_path / f"cut-{cut}"
        stopped.run(cut, **job, output=str(output), save_partial=1)
        assert len(partials_in(output)) == 1
        stopped.run(None, **job, output=str(output))
        assert rows_of(output) == whole


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "repetition_penalty": 1.2}])
def test_a_real_model_gives_the_same_text(
    tiny_llama: Path, tmp_path: Path, write_jsonl: Write, stopped: Stopped, sampling: dict[str, Any]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"How many are {i} and 2?"} for i in range(5)])
    job = {"input": (str(source),), "engine": "transformers", "model": str(tiny_llama), "raw": True, **sampling}
    job |= {"max_tokens": 60, "min_tokens": 50, "max_num_seqs": 3}
    stopped.run(None, **job, output=str(tmp_path / "whole"))
    result, _ = stopped.run(40, **job, output=str(tmp_path / "out"), save_partial=8)
    assert result.rows_saved == 3
    stopped.run(None, **job, output=str(tmp_path / "out"))
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")


# -- in the logs


@pytest.mark.parametrize(
    "record",
    [
        {"row": 0, "sample": 0, "prompt_tokens": 3, "partial": "12"},
        {"row": 0, "sample": 0, "prompt_tokens": 3, "partial": [1, -2]},
        {"row": 0, "sample": 0, "prompt_tokens": 3, "partial": [True]},
        {"row": 99, "sample": 0, "prompt_tokens": 3, "partial": [1]},
        {"row": 0, "sample": -1, "prompt_tokens": 3, "partial": [1]},
        {"row": 0, "prompt_tokens": 3, "partial": [1]},
    ],
)
def test_a_wrong_record_is_passed_over_and_counted(
    job: dict[str, Any], tmp_path: Path, stopped: Stopped, record: dict[str, Any]
) -> None:
    from batchjob.store.wal import frame

    stopped.run(70, **job, output=str(tmp_path / "out"))
    (log,) = Layout(tmp_path / "out").wal.glob("*/*.log")
    log.with_name("other.log").write_bytes(frame(json.dumps(record).encode()))
    store = Store.open(tmp_path / "out")
    store.start_attempt({})
    chunk = store.open_chunk(0)
    assert chunk.num_bad == 1
    assert len(chunk.partial(0, 0, len("row 0".split()) + 1)) == 70
    store.close()


def test_tokens_behind_another_prompt_are_not_used(job: dict[str, Any], tmp_path: Path, stopped: Stopped) -> None:
    stopped.run(70, **job, output=str(tmp_path / "out"))
    store = Store.open(tmp_path / "out")
    store.start_attempt({})
    chunk = store.open_chunk(0)
    assert [len(chunk.partial(0, 0, num_prompt)) for num_prompt in (2, 3, 4)] == [0, 70, 0]
    assert chunk.partial(0, 1, 3) == ()


def test_status_counts_no_row_for_them(job: dict[str, Any], tmp_path: Path, stopped: Stopped) -> None:
    from batchjob.store import job_status

    stopped.run(70, **job, output=str(tmp_path / "out"))
    status = job_status(tmp_path / "out")
    assert (status.num_rows_logged, status.num_rows_open, status.warnings) == (0, 8, [])


def test_a_signal_that_leaves_no_time(tmp_path: Path, write_jsonl: Write) -> None:
    """The real program: SIGTERM, no time to drain, exit 75, and the next run goes on."""
    program = """
import sys
import batchjob.engine.fake as fake
init = fake.FakeRunner.__init__
fake.FakeRunner.__init__ = lambda self, *a, **k: init(self, *a, **{**k, "step_seconds": float(sys.argv[-1])})
from batchjob.cli import main
main(sys.argv[1:-1])
"""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(8)])
    command = [sys.executable, "-c", program, "run", "--engine", "fake", "--input", str(source), "--no-supervisor"]
    command += ["--output", str(tmp_path / "out"), "--ignore-eos", "--max-tokens", "3000", "--drain-timeout", "0"]
    process = subprocess.Popen([*command, "0.005"], stderr=subprocess.PIPE, text=True)
    lines = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if line.startswith("engine"):
            break
    time.sleep(2.0)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 75, printed
    assert "8 unfinished rows" in printed
    done = subprocess.run([*command, "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "continued   8 rows" in done.stderr
    assert all(row["num_output_tokens"] == 3000 for row in rows_of(tmp_path / "out"))
