"""The fake runner: answers that depend on the row alone, and faults on demand."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from batchjob.engine import Engine, EngineConfig, FakeRunner, create_engine, fake_capacity
from batchjob.errors import EngineError
from batchjob.prompts.fake_tokenizer import FakeTokenizer
from batchjob.records import Completion, Request
from batchjob.sampling import SamplingParams
from batchjob.spec import JobSpec

TOKENIZER = FakeTokenizer()


def run(
    requests: list[Request], faults: dict[str, Any] | None = None, **limits: Any
) -> dict[tuple[int, int], Completion]:
    config = EngineConfig(max_model_len=256, eos_token_ids=TOKENIZER.eos_token_ids, **limits)
    engine = Engine(FakeRunner(fake_capacity(config), **(faults or {})), TOKENIZER, config)
    done = [completion for request in requests if (completion := engine.add(request)) is not None]
    while engine.has_unfinished():
        done += engine.step()
    return {(completion.row_index, completion.sample_index): completion for completion in done}


def requests_of(num_rows: int, **params: Any) -> list[Request]:
    return [
        Request(row, 0, TOKENIZER.encode(f"row {row} of many", add_special_tokens=True), SamplingParams(**params), row)
        for row in range(num_rows)
    ]


def test_answers_are_short_words_and_an_end_token() -> None:
    done = run(requests_of(200))
    assert len(done) == 200
    for completion in done.values():
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] == 2
        assert completion.text is not None
        assert 1 <= len(completion.text.split()) == len(completion.token_ids) - 1 <= 6
        assert all(4 <= token < 260 for token in completion.token_ids[:-1])
    assert len({completion.text for completion in done.values()}) > 150


def test_answers_do_not_depend_on_batch_order_or_preemption() -> None:
    requests = requests_of(60, min_tokens=30)
    expected = run(requests)
    assert run(requests[::-1], max_num_seqs=3) == expected
    assert run(requests, max_num_seqs=8, max_num_batched_tokens=9, block_size=4, kv_cache_bytes=1024 * 120) == expected


def test_answers_depend_on_stream_and_prompt() -> None:
    params = SamplingParams(min_tokens=6)
    texts = [
        run([Request(0, 0, prompt, params, stream)])[0, 0].text
        for prompt, stream in [([300, 301], 1), ([300, 301], 2), ([300, 302], 1), ([301, 300], 1)]
    ]
    assert len(set(texts)) == 4
    assert run([Request(9, 0, [300, 301], params, 1)])[9, 0].text == texts[0]


def test_limits_are_kept() -> None:
    assert all(len(done.token_ids) == 1 for done in run(requests_of(20, max_tokens=1)).values())
    long = run(requests_of(20, min_tokens=12)).values()
    assert all(len(done.token_ids) == 13 and done.token_ids.index(2) == 12 for done in long)
    endless = run(requests_of(20, ignore_eos=True, max_tokens=150))
    assert all((len(done.token_ids), done.finish_reason) == (150, "length") for done in endless.values())
    assert all(2 not in done.token_ids for done in endless.values())


def test_capacity_follows_the_settings() -> None:
    default = fake_capacity(EngineConfig(max_model_len=1_000_000))
    assert default.num_blocks * default.block_size >= 1_000_000
    given = fake_capacity(
        EngineConfig(max_model_len=64, block_size=8, kv_cache_bytes=64 * 1024, max_num_seqs=3, max_num_batched_tokens=5)
    )
    assert (given.num_blocks, given.block_size, given.max_num_seqs, given.max_num_batched_tokens) == (8, 8, 3, 5)


def test_create_engine_makes_it_without_a_model() -> None:
    config = EngineConfig(max_model_len=64, eos_token_ids=TOKENIZER.eos_token_ids)
    engine = create_engine(JobSpec(engine="fake"), None, config, TOKENIZER)
    assert engine.add(Request(0, 0, [1, 300], SamplingParams(), 5)) is None
    assert "fake" in engine.capacity.description


class TestFaults:
    def test_slow(self) -> None:
        started = time.perf_counter()
        run(requests_of(1, max_tokens=2, ignore_eos=True), {"step_seconds": 0.05})
        assert time.perf_counter() - started >= 0.1

    def test_crash(self) -> None:
        with pytest.raises(EngineError, match=r"step 2 failed with RuntimeError.*rows 0"):
            run(requests_of(3, min_tokens=4), {"crash_at_step": 2})

    @pytest.mark.parametrize("fault", ["kill_at_step=2", "poison_token=301"])
    def test_kill(self, fault: str) -> None:
        code = (
            "from batchjob.engine import *; from batchjob.records import Request\n"
            "from batchjob.sampling import SamplingParams; from batchjob.prompts.fake_tokenizer import FakeTokenizer\n"
            "config = EngineConfig(max_model_len=64, max_num_seqs=1)\n"
            f"engine = Engine(FakeRunner(fake_capacity(config), {fault}), FakeTokenizer(), config)\n"
            "engine.add(Request(0, 0, [300], SamplingParams(max_tokens=1), 0))\n"
            "engine.add(Request(1, 0, [301], SamplingParams(max_tokens=1), 0))\n"
            "print(engine.step()[0].row_index, flush=True); engine.step()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("0\n", -signal.SIGKILL)

    def test_hang(self) -> None:
        code = (
            "from batchjob.engine import *; from batchjob.core import StepPlan\n"
            "config = EngineConfig(max_model_len=64)\n"
            "print('hangs', flush=True)\n"
            "FakeRunner(fake_capacity(config), hang_at_step=1).execute(StepPlan([]))\n"
        )
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "hangs\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        child.kill()
        child.communicate()
