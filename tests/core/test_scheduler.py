"""The catch-up rule under each of its budgets, one example per rule. Rows end at `max_len`."""

import random

import pytest

from batchjob.core import BlockPool, Scheduler, SequenceState


def test_nothing_to_do_is_none(make_runner):
    runner = make_runner()
    assert runner.step() is None


def test_a_row_is_prefilled_then_decoded_token_by_token(make_runner, make_request):
    runner = make_runner()
    runner.add(make_request(0, range(6), max_tokens=3))
    assert runner.step() == [(0, 0, 6)]
    assert runner.step() == [(0, 6, 7)]
    assert runner.step() == [(0, 7, 8)]
    assert runner.step() is None
    assert runner.outputs == {(0, 0): runner.model.answer(make_request(0, range(6)), 3)}


def test_the_kv_of_the_last_token_is_never_computed(make_runner, make_request):
    runner = make_runner(num_blocks=2, block_size=4)  # room for 8 tokens
    runner.add(make_request(0, range(6), max_tokens=3))  # 9 tokens in the end
    runner.run()
    assert len(runner.outputs[0, 0]) == 3
    assert runner.model.num_tokens == 8


def test_a_long_prompt_is_computed_in_parts_and_samples_once(make_runner, make_request):
    runner = make_runner(max_num_batched_tokens=4)
    runner.add(make_request(0, range(10), max_tokens=1))
    assert [runner.step() for _ in range(3)] == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10)]]
    assert runner.step() is None
    assert runner.outputs[0, 0] == runner.model.answer(make_request(0, range(10)), 1)


def test_decodes_come_first_then_started_prefills_then_new_rows(make_runner, make_request):
    runner = make_runner(max_num_batched_tokens=8)
    runner.add(make_request(0, range(2)), make_request(1, range(100, 112)), make_request(2, range(200, 203)))
    assert runner.step() == [(0, 0, 2), (1, 0, 6)]
    assert runner.step() == [(0, 2, 3), (1, 6, 12), (2, 0, 1)]
    assert runner.step() == [(0, 3, 4), (1, 12, 13), (2, 1, 3)]


def test_a_decode_never_lacks_a_token_of_the_budget(make_runner, make_request):
    runner = make_runner(max_num_batched_tokens=3)
    runner.add(*(make_request(row, [row], max_tokens=5) for row in range(9)))
    assert runner.step() == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    assert runner.step() == [(0, 1, 2), (1, 1, 2), (2, 1, 2)]
    runner.run()
    assert len(runner.outputs) == 9


def test_the_last_token_of_a_prompt_alone_in_its_step_still_ends_the_prefill(make_runner, make_request):
    runner = make_runner(max_num_batched_tokens=7)
    runner.add(make_request(0, range(8), max_tokens=2), make_request(1, [*range(8), 9], max_tokens=1))
    assert [runner.step() for _ in range(3)] == [[(0, 0, 7)], [(0, 7, 8)], [(0, 8, 9), (1, 8, 9)]]


def test_no_more_than_max_num_seqs_run(make_runner, make_request):
    runner = make_runner(max_num_seqs=2)
    runner.add(*(make_request(row, [row] * 3, max_tokens=2) for row in range(3)))
    assert runner.step() == [(0, 0, 3), (1, 0, 3)]
    assert runner.scheduler.num_running == 2
    assert runner.scheduler.num_waiting == 1
    assert runner.step() == [(0, 3, 4), (1, 3, 4)]
    assert runner.step() == [(2, 0, 3)]


def test_slot_and_blocks_of_a_finished_row_are_used_in_the_next_step(make_runner, make_request):
    runner = make_runner(num_blocks=2, block_size=4, max_num_seqs=1)
    runner.add(make_request(0, range(7), max_tokens=1), make_request(1, range(7, 14), max_tokens=1))
    assert runner.step() == [(0, 0, 7)]
    assert runner.step() == [(1, 0, 7)]


def test_a_slot_stays_the_same_as_long_as_a_row_runs(make_request):
    scheduler = Scheduler(BlockPool(64, 4), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
    for row in range(6):
        scheduler.add(make_request(row, [row] * 3, max_tokens=2 + row))
    slots: dict[int, set[int]] = {}
    while (plan := scheduler.schedule()) is not None:
        for seq, _, _ in plan.slices:
            assert 0 <= seq.slot < 4
            slots.setdefault(seq.request.row_index, set()).add(seq.slot)
        scheduler.commit(plan, [1] * len(plan.sampled))
        for slice_ in plan.sampled:
            if len(slice_.seq.tokens) == slice_.seq.max_len:
                scheduler.finish(slice_.seq)
                assert slice_.seq.slot == -1
                assert slice_.seq.state is SequenceState.FINISHED
    assert all(len(used) == 1 for used in slots.values())
    assert slots.keys() == set(range(6))


def test_the_output_ends_where_the_context_does(make_runner, make_request):
    runner = make_runner(max_model_len=32)
    runner.add(*(make_request(length, range(length), max_tokens=4) for length in (8, 28, 29, 31)))
    runner.add(make_request(30, range(30), max_tokens=None))
    runner.run()
    assert {row: len(tokens) for (row, _), tokens in runner.outputs.items()} == {8: 4, 28: 4, 29: 3, 30: 2, 31: 1}


@pytest.mark.parametrize("length", [32, 33, 40])
def test_a_prompt_that_leaves_no_room_for_output_is_a_row_error(make_runner, make_request, length):
    runner = make_runner(max_model_len=32)
    error = runner.scheduler.add(make_request(0, range(length)))
    assert error.type == "prompt_too_long"
    assert f"{length} tokens" in error.message
    assert "max_model_len is 32" in error.message
    assert runner.step() is None


def test_a_prompt_larger_than_the_whole_cache_is_a_row_error(make_runner, make_request):
    runner = make_runner(num_blocks=12, block_size=16, max_model_len=512, max_num_batched_tokens=512)
    error = runner.scheduler.add(make_request(0, range(193)))
    assert error.type == "kv_cache_too_small"
    assert "193 tokens needs 13 KV blocks of 16 tokens" in error.message
    assert "the whole cache has 12 (192 tokens)" in error.message
    runner.add(make_request(1, range(192), max_tokens=1))
    runner.run()
    assert len(runner.outputs[1, 0]) == 1


def test_a_prompt_without_tokens_is_a_row_error(make_runner, make_request):
    assert make_runner().scheduler.add(make_request(0, [])).type == "invalid_prompt"


def test_a_row_at_the_head_is_not_passed_over_for_want_of_blocks(make_runner, make_request):
    runner = make_runner(num_blocks=8, block_size=4)
    runner.add(make_request(0, range(16), max_tokens=3))  # 4 blocks, later 5
    runner.add(make_request(1, range(100, 120), max_tokens=3))  # 5 blocks: has to wait
    runner.add(make_request(2, range(200, 202), max_tokens=3))  # would fit, but stands behind
    order = [row for _ in range(12) for row, start, _ in runner.step() or [] if start == 0]
    assert order == [0, 1, 2]


def test_a_row_that_lacks_blocks_is_not_looked_at_again_in_each_step(make_runner, make_request, monkeypatch):
    runner = make_runner(num_blocks=20, block_size=4)
    runner.add(*(make_request(row, range(100 * row, 100 * row + 20), max_tokens=60) for row in range(50)))
    runner.step()
    matches = []
    match = runner.pool.match
    monkeypatch.setattr(runner.pool, "match", lambda *args: matches.append(args) or match(*args))
    assert runner.scheduler.num_waiting > 45
    for _ in range(20):
        runner.step()
    assert len(matches) <= 2


def test_admission_leaves_a_block_to_each_row_that_may_grow(make_runner, make_request):
    runner = make_runner(num_blocks=6, block_size=4)
    runner.add(*(make_request(row, [row] * 4, max_tokens=4) for row in range(4)))
    assert runner.step() == [(0, 0, 4), (1, 0, 4), (2, 0, 4)]  # 3 blocks taken, 3 left to 3 rows
    runner.run()
    assert runner.scheduler.num_preemptions == 0


def test_rows_that_cannot_grow_may_fill_the_cache(make_runner, make_request):
    runner = make_runner(num_blocks=4, block_size=4)
    runner.add(*(make_request(row, [row] * 4, max_tokens=1) for row in range(4)))
    assert runner.step() == [(0, 0, 4), (1, 0, 4), (2, 0, 4), (3, 0, 4)]


def test_drop_waiting_takes_out_all_that_does_not_run(make_runner, make_request):
    runner = make_runner(max_num_seqs=1)
    runner.add(*(make_request(row, range(9), max_tokens=2) for row in range(3)))  # rows 1 and 2 share the prefix of 0
    runner.step()
    dropped = runner.scheduler.drop_waiting()
    runner.scheduler.check()
    assert sorted(seq.request.row_index for seq in dropped) == [1, 2]
    assert {seq.state for seq in dropped} == {SequenceState.FINISHED}
    runner.run()
    assert list(runner.outputs) == [(0, 0)]


def test_rows_may_be_let_in_less_often_while_slots_are_scarce(make_runner, make_request):
    """Most steps are of decodes alone then, for a few steps more in all."""
    rng = random.Random(0)
    requests = [make_request(row, range(row, row + 9), max_tokens=rng.randint(10, 90)) for row in range(400)]
    num_steps, num_mixed = {}, {}
    for interval in (1, 8):
        runner = make_runner(
            num_blocks=4096,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            admission_interval=interval,
            checked=False,
        )
        runner.add(*requests)
        num_mixed[interval] = 0
        while (plan := runner.step()) is not None:
            num_mixed[interval] += any(stop - start > 1 for _, start, stop in plan)
        num_steps[interval] = runner.num_steps
        assert runner.outputs == {(r.row_index, 0): runner.model.answer(r, r.params.max_tokens) for r in requests}
    assert num_mixed[8] < 0.45 * num_mixed[1]
    assert num_steps[8] < 1.06 * num_steps[1]


def test_rows_are_let_in_less_often_while_blocks_are_scarce_too(make_runner, make_request):
    """With more slots than the cache has room for, it is blocks that a row waits for."""
    requests = [make_request(row, range(row, row + 9), max_tokens=20 + row % 23) for row in range(200)]
    num_mixed = {}
    for interval in (1, 8):
        runner = make_runner(
            num_blocks=200,
            max_num_seqs=128,
            max_num_batched_tokens=512,
            admission_interval=interval,
            checked=False,
        )
        runner.add(*requests)
        num_mixed[interval] = 0
        while (plan := runner.step()) is not None:
            num_mixed[interval] += any(stop - start > 1 for _, start, stop in plan)
        assert runner.outputs == {(r.row_index, 0): runner.model.answer(r, r.params.max_tokens) for r in requests}
    assert num_mixed[8] < 0.6 * num_mixed[1]


def test_rows_are_let_in_at_once_where_slots_are_free_or_nothing_else_runs(make_runner, make_request):
    runner = make_runner(max_num_seqs=4, admission_interval=100)
    runner.add(*(make_request(row, range(9), max_tokens=5) for row in range(9)))
    runner.run()
    assert len(runner.outputs) == 9


def test_commit_wants_one_token_for_each_slice_that_samples(make_request):
    scheduler = Scheduler(BlockPool(8, 4), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
    scheduler.add(make_request(0, [1, 2, 3]))
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="zip"):
        scheduler.commit(plan, [])


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_limit_of_zero_is_refused(make_runner, name):
    with pytest.raises(ValueError, match=name):
        make_runner(**{name: 0})
