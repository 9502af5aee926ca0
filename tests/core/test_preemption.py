"""Running out of blocks: who goes, what is kept, and that all get to the end."""

import pytest

from batchjob.core import SequenceState


def test_the_latest_admitted_is_preempted_and_comes_back_with_its_tokens(make_runner, make_request):
    runner = make_runner(num_blocks=6, block_size=4)
    requests = [make_request(row, [row] * 4, max_tokens=14) for row in range(2)]
    runner.add(*requests)
    runner.run_until_preempted()
    first, second = runner.seen
    assert (first.state, second.state) == (SequenceState.RUNNING, SequenceState.WAITING)
    assert second.num_output_tokens > 0
    assert second.num_preemptions == 1
    assert (second.slot, second.blocks, second.num_computed) == (-1, [], 0)
    kept = list(second.tokens)
    runner.run()
    assert second.tokens[: len(kept)] == kept
    assert runner.outputs == {(row, 0): runner.model.answer(requests[row], 14) for row in range(2)}


def test_a_step_that_preempts_admits_nothing(make_runner, make_request):
    runner = make_runner(num_blocks=9, block_size=4)
    runner.add(*(make_request(row, [row] * 4, max_tokens=14) for row in range(3)))
    before = 0
    while (plan := runner.step()) is not None:
        if runner.scheduler.num_preemptions > before:
            assert all(stop - start == 1 for _, start, stop in plan)
            assert runner.scheduler.num_waiting
        before = runner.scheduler.num_preemptions
    assert before > 0


def test_a_preempted_row_goes_before_the_queue(make_runner, make_request):
    runner = make_runner(num_blocks=6, block_size=4, max_num_seqs=2)
    runner.add(*(make_request(row, [row] * 4, max_tokens=14) for row in range(5)))
    runner.run_until_preempted()
    admitted = []
    while (plan := runner.step()) is not None:
        admitted += [row for row, start, stop in plan if stop - start > 1]
    assert admitted[0] == 1
    assert sorted(runner.outputs) == [(row, 0) for row in range(5)]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_what_a_preempted_row_has_computed_is_found_again(make_runner, make_request, prefix_caching):
    """Its generated blocks too; with prefix caching off these are still its own blocks."""
    runner = make_runner(num_blocks=9, block_size=4, prefix_caching=prefix_caching)
    runner.add(make_request(0, [1] * 4, max_tokens=24), make_request(1, [2] * 4, max_tokens=24))
    runner.run_until_preempted()
    lost = runner.scheduler.num_recomputed_tokens
    runner.run()
    assert runner.scheduler.num_recomputed_tokens <= lost - 8
    assert runner.scheduler.num_cached_tokens == 0
    assert len(runner.outputs) == 2


def test_tokens_computed_again_are_counted(make_runner, make_request):
    runner = make_runner(num_blocks=6, block_size=4)
    runner.add(*(make_request(row, [row] * 4, max_tokens=14) for row in range(2)))
    runner.run()
    assert runner.scheduler.num_recomputed_tokens > 0
    assert runner.model.num_tokens == 2 * (4 + 14 - 1) + runner.scheduler.num_recomputed_tokens


def test_a_row_that_outgrows_the_whole_cache_is_handed_back(make_runner, make_request):
    runner = make_runner(num_blocks=4, block_size=4)
    runner.add(make_request(0, range(10), max_tokens=20))
    runner.run()
    assert runner.outputs == {}
    [seq] = runner.out_of_cache
    assert seq.state is SequenceState.FINISHED
    assert len(seq.tokens) == 17  # 16 in the cache and one that was sampled from them
    assert seq.num_preemptions == 0


def test_a_row_that_fills_the_whole_cache_ends_well(make_runner, make_request):
    runner = make_runner(num_blocks=12, block_size=16, max_model_len=512, max_num_batched_tokens=64)
    sizes = {0: (184, 8), 1: (185, 8), 2: (186, 8)}  # 191, 192 and 193 positions are needed
    small = dict.fromkeys(range(3, 6), (40, 8))
    for row, (length, max_tokens) in {**sizes, **small}.items():
        runner.add(make_request(row, range(row, row + length), max_tokens=max_tokens))
    runner.run()
    assert [seq.request.row_index for seq in runner.out_of_cache] == [2]
    assert {row: len(tokens) for (row, _), tokens in runner.outputs.items()} == dict.fromkeys([0, 1, 3, 4, 5], 8)


def test_rows_that_outgrow_the_cache_do_not_hold_up_the_rest(make_runner, make_request):
    runner = make_runner(num_blocks=4, block_size=4)
    runner.add(*(make_request(row, range(13), max_tokens=30) for row in range(2)))
    runner.add(*(make_request(row, range(12), max_tokens=5) for row in range(2, 4)))
    runner.run()
    assert sorted(seq.request.row_index for seq in runner.out_of_cache) == [0, 1]
    assert {row: len(tokens) for (row, _), tokens in runner.outputs.items()} == {2: 5, 3: 5}


def test_when_the_owner_of_a_pending_prefix_is_preempted_the_rows_behind_it_go_on(make_runner, make_request):
    runner = make_runner(num_blocks=12, block_size=4, max_num_batched_tokens=8)
    requests = [make_request(0, [7], max_tokens=30), make_request(1, [8], max_tokens=30)]
    requests += [make_request(row, range(24), max_tokens=6) for row in range(2, 5)]
    runner.add(*requests)
    runner.run()
    assert runner.outputs == {(r.row_index, 0): runner.model.answer(r, r.params.max_tokens) for r in requests}


def test_the_smallest_pool_still_gets_everything_done(make_runner, make_request):
    runner = make_runner(num_blocks=3, block_size=4, max_num_batched_tokens=3)
    requests = [make_request(row, range(row % 5 + 1), max_tokens=7) for row in range(40)]
    runner.add(*requests)
    runner.run()
    assert runner.outputs == {(r.row_index, 0): runner.model.answer(r, 7) for r in requests}
