"""A step scheduled before the tokens of the last one are known, and several decode steps in one plan."""

import random
from dataclasses import replace

import pytest

from batchjob.core import BlockPool, Scheduler


def answers(runner, requests, eos=None):
    return {(r.row_index, r.sample_index): runner.model.answer(r, r.params.max_tokens, eos) for r in requests}


def make_requests(make_request, number, seed=0):
    rng = random.Random(seed)
    return [
        make_request(row, [rng.randrange(3) for _ in range(rng.randint(1, 14))], max_tokens=rng.randint(1, 20))
        for row in range(number)
    ]


@pytest.mark.parametrize("num_steps", [1, 2, 4, 8])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [9, 64])
def test_answers_do_not_depend_on_how_far_ahead_the_host_is(make_runner, make_request, num_blocks, ahead, num_steps):
    runner = make_runner(num_blocks=num_blocks, block_size=4, ahead=ahead, num_steps=num_steps, eos=0)
    requests = make_requests(make_request, 40)
    runner.add(*requests)
    runner.run()
    assert runner.outputs == answers(runner, requests, eos=0)
    assert num_blocks > 9 or runner.scheduler.num_preemptions


def test_a_row_that_ends_by_its_length_is_not_scheduled_in_vain(make_runner, make_request):
    runner = make_runner(ahead=True)
    runner.add(make_request(0, range(6), max_tokens=3))
    runner.run()
    assert runner.model.num_tokens == 6 + 3 - 1


def test_a_row_that_ends_by_a_token_is_scheduled_once_more(make_runner, make_request):
    [request] = [r for r in make_requests(make_request, 40) if len(make_runner().model.answer(r, 20, 0)) == 5][:1]
    request = make_request(request.row_index, request.token_ids, max_tokens=20)
    num_computed = []
    for ahead in (False, True):
        runner = make_runner(ahead=ahead, eos=0)
        runner.add(request)
        runner.run()
        num_computed.append(runner.model.num_tokens)
    assert num_computed == [len(request.token_ids) + 4, len(request.token_ids) + 5]


def test_several_steps_are_planned_for_decodes_alone(make_runner, make_request):
    runner = make_runner(num_steps=4)
    runner.add(make_request(0, range(5), max_tokens=20))
    runner.step()
    assert runner.num_steps == 1
    runner.step()
    assert runner.num_steps == 5
    runner.add(make_request(1, range(20, 25), max_tokens=20))
    runner.step()
    assert runner.num_steps == 6, "a step with a prompt in it is one step"
    runner.step()
    assert runner.num_steps == 10


def test_too_few_blocks_for_several_steps_mean_fewer_steps_and_no_preemption(make_runner, make_request):
    runner = make_runner(num_blocks=6, block_size=4, num_steps=16)
    runner.add(make_request(0, [1] * 4, max_tokens=8), make_request(1, [2] * 4, max_tokens=8))
    runner.run()
    assert runner.scheduler.num_preemptions == 0
    assert runner.num_steps > 3


def test_a_row_with_stop_strings_gets_one_step_at_a_time(make_runner, make_request):
    runner = make_runner(num_steps=4)
    request = make_request(0, range(5), max_tokens=8)
    runner.add(replace(request, params=replace(request.params, stop=("x",))), make_request(1, [9, 9], max_tokens=8))
    num_plans = 0
    while runner.step() is not None:
        num_plans += 1
    assert num_plans == runner.num_steps == 8


def test_a_row_that_is_preempted_with_a_token_in_flight_loses_none(make_runner, make_request):
    runner = make_runner(num_blocks=6, block_size=4, ahead=True)
    requests = [make_request(row, [row] * 4, max_tokens=14) for row in range(2)]
    runner.add(*requests)
    runner.run_until_preempted()
    second = list(runner.seen)[1]
    assert second.num_preemptions == 1
    runner.run()
    assert second.num_in_flight == 0
    assert runner.outputs == answers(runner, requests)


def test_a_preempted_row_waits_until_its_tokens_in_flight_are_known(make_request):
    """However far ahead: its next prompt has them in it."""
    scheduler = Scheduler(BlockPool(6, 4), max_num_seqs=2, max_num_batched_tokens=64, max_model_len=100)
    for row in range(2):
        scheduler.add(make_request(row, [row] * 4, max_tokens=14))
    plans = []
    while not scheduler.num_preemptions:
        plans.append(scheduler.schedule())
    first, second = (slice_.seq for slice_ in plans[0].slices)
    assert second.num_in_flight == len(plans) - 1
    plans.append(scheduler.schedule())
    assert scheduler.num_waiting == 1, "there is room for the tokens that are known"
    for plan in plans:
        scheduler.commit(plan, [7] * len(plan.sampled))
    scheduler.finish(first)
    [slice_] = scheduler.schedule().slices
    assert (slice_.seq, slice_.stop) == (second, 4 + len(plans) - 2)
