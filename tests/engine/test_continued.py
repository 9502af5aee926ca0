"""Requests that were taken out in the middle and continue after the tokens that they had generated."""

from __future__ import annotations

from typing import Any

import pytest

from batchjob.engine import Engine, EngineConfig, FakeRunner, fake_capacity
from batchjob.prompts.fake_tokenizer import FakeTokenizer
from batchjob.records import Completion, Request
from batchjob.sampling import SamplingParams

TOKENIZER = FakeTokenizer()


def make_engine(**limits: Any) -> Engine:
    config = EngineConfig(max_model_len=256, eos_token_ids=TOKENIZER.eos_token_ids, **limits)
    return Engine(FakeRunner(fake_capacity(config)), TOKENIZER, config)


def requests_of(num_rows: int, **params: Any) -> list[Request]:
    prompts = [TOKENIZER.encode(f"row {row} of many", add_special_tokens=True) for row in range(num_rows)]
    return [Request(row, 0, prompt, SamplingParams(**params), row) for row, prompt in enumerate(prompts)]


def run(engine: Engine, requests: list[Request], steps: int | None = None) -> list[Completion]:
    done = [completion for request in requests if (completion := engine.add(request)) is not None]
    while engine.has_unfinished() and steps != 0:
        done += engine.step()
        steps = None if steps is None else steps - 1
    return done


def take_out(engine: Engine) -> list[Request]:
    dropped = engine.drop_running() + engine.drop_waiting()
    assert not engine.has_unfinished()
    return dropped


@pytest.mark.parametrize("params", [{"min_tokens": 40}, {"max_tokens": 50, "ignore_eos": True}])
def test_they_end_as_if_nothing_had_happened(params: dict[str, Any]) -> None:
    requests = requests_of(20, **params)
    expected = {done.row_index: done for done in run(make_engine(), requests)}
    for steps in (1, 7, 39):
        engine = make_engine(max_num_seqs=12)
        done = run(engine, requests, steps)
        dropped = take_out(engine)
        assert sorted(request.row_index for request in dropped) == list(range(20))
        assert sum(len(request.output_token_ids) for request in dropped) == engine.stats.num_sampled == 12 * steps
        other = make_engine()
        done += run(other, dropped)
        assert {completion.row_index: completion for completion in done} == expected
        total = sum(len(completion.token_ids) for completion in expected.values())
        assert engine.stats.num_sampled + other.stats.num_sampled == total


def test_preempted_rows_come_back_with_their_tokens() -> None:
    engine = make_engine(block_size=4, kv_cache_bytes=1024 * 4 * 30)
    run(engine, requests_of(10, max_tokens=40, ignore_eos=True), 20)
    assert engine.stats.num_preempted > 0
    waiting = engine.drop_waiting()
    assert any(request.output_token_ids for request in waiting)


def test_a_row_that_no_longer_fits_is_an_error_with_the_numbers() -> None:
    engine = make_engine()
    run(engine, requests_of(1, max_tokens=100, ignore_eos=True), 60)
    (request,) = take_out(engine)
    (done,) = run(make_engine(kv_cache_bytes=1024 * 16 * 3), [request])
    assert done.error is not None
    assert done.error.type == "kv_cache_too_small"
    assert f"prompt and output of {len(request.token_ids) + 60} tokens" in done.error.message
