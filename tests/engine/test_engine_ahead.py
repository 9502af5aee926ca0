"""The engine ahead of its knowledge: steps started before the last tokens are known, several decode steps at once.

What comes out is what one step at a time gives.
"""

from __future__ import annotations

import random

import pytest
from test_engine import EOS, Letters, ScriptedRunner, codes

from batchjob.engine import Engine, EngineConfig
from batchjob.records import Completion, Request
from batchjob.sampling import SamplingParams

WAYS = [(False, 1), (True, 1), (False, 2), (False, 8), (True, 4)]


def requests() -> list[Request]:
    rng = random.Random(3)
    settings = [
        SamplingParams(),
        SamplingParams(max_tokens=7),
        SamplingParams(stop=("ef",)),
        SamplingParams(stop=("ef", "b"), min_tokens=4, include_stop=True),
        SamplingParams(stop_token_ids=(ord("g"),)),
        SamplingParams(ignore_eos=True, max_tokens=19),
        SamplingParams(min_tokens=9),
    ]
    return [Request(row, 0, [65 + row % 3] * rng.randint(1, 9), rng.choice(settings), row) for row in range(50)]


def answers() -> list[list[int]]:
    rng = random.Random(4)
    rows = [[rng.choice(codes("abcdefgh")) for _ in range(rng.randint(1, 30))] + [EOS] for _ in range(50)]
    rows[7][1:1] = [-1]  # logits that are no numbers
    return rows


def run(ahead: bool, num_steps: int, **limits: int) -> tuple[list[Completion], Engine]:
    runner = ScriptedRunner(answers(), async_scheduling=ahead, **limits)
    config = EngineConfig(max_model_len=40, eos_token_ids=(EOS,), decode_steps_per_launch=num_steps)
    engine = Engine(runner, Letters(), config)
    for request in requests():
        assert engine.add(request) is None
    done = []
    while engine.has_unfinished():
        done += engine.step()
    assert engine._task._stop_strings == {}
    return sorted(done, key=lambda completion: completion.row_index), engine


@pytest.mark.parametrize("num_blocks", [10, 64])
@pytest.mark.parametrize(("ahead", "num_steps"), WAYS)
def test_rows_are_the_same(ahead: bool, num_steps: int, num_blocks: int) -> None:
    expected, _ = run(False, 1, num_blocks=64)
    actual, engine = run(ahead, num_steps, num_blocks=num_blocks)
    assert actual == expected
    stats = engine.stats
    assert stats.num_sampled == sum(len(completion.token_ids) + (completion.error is not None) for completion in actual)
    assert (stats.num_wasted > 0) == ((ahead, num_steps) != (False, 1))
    assert num_blocks > 10 or stats.num_preemptions


@pytest.mark.parametrize(("ahead", "num_steps"), WAYS)
def test_what_is_dropped_goes_on_where_it_was(ahead: bool, num_steps: int) -> None:
    expected, _ = run(False, 1)
    runner = ScriptedRunner(answers(), async_scheduling=ahead)
    config = EngineConfig(max_model_len=40, eos_token_ids=(EOS,), decode_steps_per_launch=num_steps)
    engine = Engine(runner, Letters(), config)
    for request in requests():
        engine.add(request)
    done = []
    while engine.has_unfinished():
        for _ in range(3):
            done += engine.step()
        for request in [*engine.drop_running(), *engine.drop_waiting()]:
            assert engine.add(request) is None
    assert sorted(done, key=lambda completion: completion.row_index) == expected


def test_the_next_step_starts_before_the_last_one_is_looked_at() -> None:
    runner = ScriptedRunner([codes("abc$")], async_scheduling=True)
    engine = Engine(runner, Letters(), EngineConfig(max_model_len=50, eos_token_ids=(EOS,)))
    engine.add(Request(0, 0, [65], SamplingParams(max_tokens=3), 0))
    assert engine.step() == []
    assert (len(runner.plans), engine.stats.num_sampled) == (1, 0)
    assert engine.step() == []
    assert (len(runner.plans), engine.stats.num_sampled) == (2, 1)
