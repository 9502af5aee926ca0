"""The feeder process gives what the same work in this process gives, and never outlives or blocks its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from inline_feeder import InlineFeeder

from batchjob.errors import BatchJobError, EngineError, InputMissingError, UsageError
from batchjob.prompts.feeder import Feeder, FeederConfig
from batchjob.records import Prompt

ConfigOf = Callable[..., FeederConfig]
Drain = Callable[..., list[Prompt]]
WriteJsonl = Callable[[Path, Iterable[Any]], Path]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """1,000 rows: good ones, bad ones, rows with settings of their own."""
    lines = []
    for index in range(1000):
        if index % 97 == 3:
            lines.append("broken")
        elif index % 50 == 7:
            lines.append(json.dumps({"prompt": "x", "params": {"nope": index}}))
        elif index % 10 == 1:
            lines.append(json.dumps({"prompt": f"row {index}", "params": {"seed": index, "stop": ["a", "b"]}}))
        else:
            lines.append(json.dumps({"prompt": f"row {index} " * (index % 30)}))
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_the_process_gives_what_the_same_work_inline_gives(mixed: Path, config_of: ConfigOf, drain: Drain) -> None:
    config = config_of(mixed, chunk_rows=300)
    skip = [0, 5, 299, 300, 777]
    with closing(InlineFeeder(config)) as inline, closing(Feeder(config)) as feeder:
        expected = drain(inline, config, skip)
        found = drain(feeder, config, skip)
    assert found == expected
    assert [prompt.row_index for prompt in found] == [row for row in range(1000) if row not in skip]
    assert {p.error.type for p in found if p.error} == {"invalid_json", "invalid_params"}
    assert sum(p.params is not None for p in found) > 50


def test_repeated_prompts_are_rows_of_their_own(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, drain: Drain
) -> None:
    same = {"prompt": "Tell a riddle.", "params": {"seed": 1}}
    path = write_jsonl(tmp_path / "a.jsonl", [same, {**same, "params": {"seed": 2}}, same, {"prompt": "Sing."}, same])
    config = config_of(path)
    with closing(InlineFeeder(config)) as feeder:
        prompts = drain(feeder, config)
    assert [p.row_index for p in prompts] == [0, 1, 2, 3, 4]
    assert prompts[0].token_ids == prompts[2].token_ids == prompts[4].token_ids
    with closing(InlineFeeder(config)) as feeder:  # rows 0 and 2 are done: those alone are left out
        assert [p.row_index for p in drain(feeder, config, skip=[0, 2])] == [1, 3, 4]


def test_a_chunk_with_every_row_done_ends_at_once(mixed: Path, config_of: ConfigOf, drain: Drain) -> None:
    config = config_of(mixed, chunk_rows=1000)
    with closing(InlineFeeder(config)) as feeder:
        assert drain(feeder, config, skip=range(1000)) == []


def test_long_rows_come_in_small_batches(tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x " * 300_000} for _ in range(5)])
    config = config_of(path)
    with closing(InlineFeeder(config)) as feeder:
        feeder.feed(config.plan.chunks[0])
        sizes = []
        while batches := feeder.poll():
            sizes += [len(batch.prompts) for batch in batches]
    assert sizes == [2, 2, 1, 0]


# -- errors


@pytest.mark.parametrize("kind", [Feeder, InlineFeeder])
def test_a_changed_input_raises_what_it_is(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, kind: Callable[[FeederConfig], Any]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}] * 10)
    config = config_of(path)
    write_jsonl(path, [{"prompt": "x"}] * 11)
    with closing(kind(config)) as feeder:
        feeder.feed(config.plan.chunks[0])
        for _ in range(2):  # and again
            with pytest.raises(InputMissingError, match=r"a\.jsonl"):
                feeder.poll(30)


def test_batches_read_before_an_error_are_handed_out_first(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf
) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"prompt": "x"}] * 3)
    gone = write_jsonl(tmp_path / "2.jsonl", [{"prompt": "x"}] * 3)
    config = config_of(tmp_path, chunk_rows=3)
    gone.unlink()
    with closing(Feeder(config)) as feeder:
        for chunk in config.plan.chunks:
            feeder.feed(chunk)
        prompts: list[Prompt] = []
        while len(prompts) < 3:
            prompts += [prompt for batch in feeder.poll(30) for prompt in batch.prompts]
        with pytest.raises(InputMissingError, match="gone"):
            wait_until(lambda: bool([batch for batch in feeder.poll(1) if batch.prompts]))
    assert len(prompts) == 3


def test_a_tokenizer_that_cannot_do_the_job_raises_what_it_is(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf
) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}]), tokenizer=str(tmp_path / "gone"))
    with closing(Feeder(config)) as feeder, pytest.raises(InputMissingError, match="tokenizer directory"):
        feeder.poll(30)


@pytest.mark.parametrize("error", [UsageError("a: b"), InputMissingError("x"), EngineError("y")])
def test_every_error_crosses_the_pipe_as_itself(error: BatchJobError) -> None:
    from batchjob.prompts.feeder.frames import Failure

    again = Failure.of(error).error()
    assert (type(again), str(again)) == (type(error), str(error))


# -- the process


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_close_ends_the_child_whatever_it_is_doing(mixed: Path, config_of: ConfigOf) -> None:
    config = config_of(mixed, chunk_rows=1)
    feeder = Feeder(config)
    for chunk in config.plan.chunks:
        feeder.feed(chunk)
    assert feeder.poll(30)
    started = time.monotonic()
    feeder.close()
    feeder.close()
    assert time.monotonic() - started < 5
    assert not alive(feeder.pid)


def test_signals_meant_for_the_job_do_not_end_the_child(mixed: Path, config_of: ConfigOf, drain: Drain) -> None:
    config = config_of(mixed, chunk_rows=500)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with closing(Feeder(config)) as feeder:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
        assert os.getpgid(feeder.pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(feeder.pid, number)
        assert len(drain(feeder, config)) == 1000


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path, write_jsonl: WriteJsonl, project_root: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "word " * 200}] * 20_000)
    script = textwrap.dedent(
        """
        import sys, time
        from batchjob.prompts.feeder import Feeder, FeederConfig
        from batchjob.inputs.planner import make_plan
        from batchjob.prompts import PromptConfig, resolve_prompt
        from batchjob.sampling import SamplingParams
        from batchjob.spec import JobSpec
        result = make_plan(JobSpec(input=(sys.argv[1],)))
        config = PromptConfig(resolve_prompt(JobSpec(), result.columns), SamplingParams(), 1000, 65536)
        feeder = Feeder(FeederConfig(result.plan, config, "fake"))
        for chunk in result.plan.chunks:
            feeder.feed(chunk)
        while not feeder.poll(1):
            pass
        print(feeder.pid, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, cwd=project_root
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not alive(child), 10)


def test_reading_ahead_is_bounded(tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, drain: Drain) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "word " * 100}] * 40_000)
    config = config_of(path, chunk_rows=500)
    with closing(Feeder(config)) as feeder:
        for chunk in config.plan.chunks:
            feeder.feed(chunk)

        def read_so_far() -> int:
            (line,) = (row for row in Path(f"/proc/{feeder.pid}/io").read_text().splitlines() if "rchar" in row)
            return int(line.split()[1])

        assert wait_until(feeder._queue.full)
        time.sleep(0.3)  # nobody polls: it fills the pipe and stops
        before = read_so_far()
        time.sleep(0.3)
        assert read_so_far() == before
        assert feeder._queue.qsize() == 8
        assert sum(len(batch.prompts) for batch in feeder.poll()) <= 10 * 256


def test_the_child_has_no_torch_and_little_memory(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, tiny_tokenizer: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"word {index}"} for index in range(2000)])
    config = config_of(path, tokenizer=str(tiny_tokenizer), chat=True)
    with closing(Feeder(config)) as feeder:
        feeder.feed(config.plan.chunks[0])
        (batch, *_) = feeder.poll(60)
        assert all(prompt.error is None for prompt in batch.prompts)
        maps = Path(f"/proc/{feeder.pid}/maps").read_text()
        status = Path(f"/proc/{feeder.pid}/status").read_text()
    assert "libtorch" not in maps
    (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 400 * 1024  # kB


MEMORY_HOG = "{% if messages[0].content == 'hog' %}{{ ('x' * 10**10) | length }}{% endif %}{{ messages[0].content }}"


def test_a_template_that_wants_ten_gigabytes_costs_one_row(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, make_tokenizer: Callable[[str], Path], drain: Drain
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in ("a", "hog", "b")])
    config = config_of(path, tokenizer=str(make_tokenizer(MEMORY_HOG)), chat=True)
    with closing(Feeder(config)) as feeder:
        first, hog, last = drain(feeder, config)
    assert first.error is last.error is None
    assert hog.error is not None
    assert hog.error.type == "template_error"


def test_throughput_and_flat_memory(tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, drain: Drain) -> None:
    """At least 15,000 short rows a second are wanted; 5,000 are asked for here, on a machine that does other work."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": i, "prompt": f"What is {i} in words?"} for i in range(60_000)])
    config = config_of(path)
    with closing(Feeder(config)) as feeder:

        def peak() -> int:
            status = Path(f"/proc/{feeder.pid}/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

        few = FeederConfig(config.plan.__class__(config.plan.files, config.plan.chunks[:4], {}, b""), config.prompt, "")
        first = drain(feeder, few)
        early = peak()
        for chunk in config.plan.chunks[4:]:
            feeder.feed(chunk)
        started = time.monotonic()
        rows = len(first)
        while rows < 60_000:
            rows += sum(len(batch.prompts) for batch in feeder.poll(1))
        seconds = time.monotonic() - started
        assert peak() - early < 8 * 1024
    assert 60_000 / seconds > 5_000
