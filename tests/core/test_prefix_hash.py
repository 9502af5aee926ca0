"""What rows share: hits, prefixes that are being computed, samples of one row."""

import pytest

from batchjob.core import prefix_hash as chain_module


def test_a_finished_row_leaves_its_prompt_to_the_next(make_runner, make_request):
    runner = make_runner()
    runner.add(make_request(0, range(10), max_tokens=1))
    runner.run()
    runner.add(make_request(1, range(10), max_tokens=1))
    assert runner.step() == [(1, 8, 10)]
    assert runner.scheduler.num_cached_tokens == 8


def test_a_prompt_that_is_all_there_computes_its_last_block_again(make_runner, make_request):
    runner = make_runner()
    runner.add(make_request(0, range(8), max_tokens=3), make_request(1, [*range(8), 99], max_tokens=1))
    runner.step()
    runner.add(make_request(2, range(8), max_tokens=3))
    assert runner.step() == [(0, 8, 9), (1, 8, 9), (2, 4, 8)]
    runner.run()
    assert runner.outputs[2, 0] == runner.model.answer(make_request(2, range(8)), 3)


def test_a_prefix_that_is_being_computed_is_waited_for_not_computed_again(make_runner, make_request):
    runner = make_runner()
    runner.add(*(make_request(row, [*range(20), 100 + row], max_tokens=2) for row in range(5)))
    assert runner.step() == [(0, 0, 21)]
    assert runner.step() == [(0, 21, 22), *((row, 20, 21) for row in range(1, 5))]
    runner.run()
    assert runner.scheduler.num_prompt_tokens_computed == 20 + 5


def test_rows_wait_until_all_they_have_in_common_is_computed(make_runner, make_request):
    runner = make_runner(max_num_batched_tokens=8)
    runner.add(make_request(0, range(20), max_tokens=1), make_request(1, [*range(16), 99], max_tokens=1))
    assert [runner.step() for _ in range(3)] == [[(0, 0, 8)], [(0, 8, 16)], [(0, 16, 20), (1, 16, 17)]]


def test_the_queue_goes_on_behind_rows_that_wait_for_a_prefix(make_runner, make_request):
    runner = make_runner()
    runner.add(*(make_request(row, range(20), max_tokens=1) for row in range(3)))
    runner.add(make_request(3, [77, 78], max_tokens=1))
    assert runner.step() == [(0, 0, 20), (3, 0, 2)]
    assert runner.scheduler.num_waiting == 2
    assert runner.step() == [(1, 16, 20), (2, 16, 20)]


def test_rows_passed_over_come_before_the_rest_and_in_order(make_runner, make_request):
    runner = make_runner(max_num_seqs=4)
    runner.add(*(make_request(row, range(20), max_tokens=1) for row in range(3)))
    runner.add(*(make_request(row, [row], max_tokens=1) for row in range(3, 9)))
    assert [row for row, _, _ in runner.step()] == [0, 3, 4, 5]
    assert [row for row, _, _ in runner.step()] == [1, 2, 6, 7]


def test_a_prefix_of_a_row_that_ends_early_is_taken_up_by_the_next(make_runner, make_request):
    runner = make_runner(max_num_batched_tokens=8)
    runner.add(*(make_request(row, range(20), max_tokens=1) for row in range(3)))
    assert runner.step() == [(0, 0, 8)]
    runner.scheduler.finish(runner.running[0])
    runner.scheduler.check()
    assert runner.step() == [(1, 8, 16)]
    assert runner.step() == [(1, 16, 20), (2, 16, 20)]
    runner.run()
    assert sorted(runner.outputs) == [(1, 0), (2, 0)]


def test_a_step_passes_over_a_bounded_number_of_rows(make_runner, make_request):
    runner = make_runner()
    runner.add(*(make_request(row, range(20), max_tokens=1) for row in range(65)))
    runner.add(make_request(65, [9], max_tokens=1))
    assert runner.step() == [(0, 0, 20)]
    runner.run()
    assert len(runner.outputs) == 66
    runner = make_runner()
    runner.add(*(make_request(row, range(20), max_tokens=1) for row in range(64)))
    runner.add(make_request(65, [9], max_tokens=1))
    assert runner.step() == [(0, 0, 20), (65, 0, 1)]


def test_ninety_six_rows_behind_one_long_prefix_compute_it_once(make_runner, make_request):
    runner = make_runner(1000, 16, max_num_seqs=96, max_num_batched_tokens=512, checked=False)
    runner.add(*(make_request(row, [*range(1870), 5000 + row], max_tokens=8) for row in range(96)))
    runner.run()
    shared = 1870 // 16 * 16
    assert runner.scheduler.num_prompt_tokens_computed == shared + 96 * (1871 - shared)
    assert runner.num_steps < 24


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_of_a_row_share_the_blocks_of_its_prompt(make_runner, make_request, prefix_caching):
    runner = make_runner(prefix_caching=prefix_caching)
    runner.add(*(make_request(0, range(18), max_tokens=3, sample=i, n=6) for i in range(6)))
    runner.step()
    runner.step()
    tables = [seq.blocks for seq in runner.running]
    assert len(tables) == 6
    assert all(table[:4] == tables[0][:4] for table in tables)
    assert len({table[4] for table in tables}) == 6
    runner.run()
    assert runner.scheduler.num_prompt_tokens_computed == 16 + 6 * 2
    assert len(runner.outputs) == 6


def test_without_prefix_caching_rows_share_nothing(make_runner, make_request):
    runner = make_runner(prefix_caching=False)
    runner.add(*(make_request(row, range(9), max_tokens=2, sample=i, n=2) for row in range(3) for i in range(2)))
    runner.add(make_request(3, range(9), max_tokens=2))
    runner.step()
    blocks = [set(seq.blocks) for seq in runner.running]
    assert len(set.union(*blocks)) == sum(map(len, blocks))
    runner.run()
    assert runner.scheduler.num_prompt_tokens_computed == 3 * (9 + 1) + 9


def test_a_hit_survives_the_reuse_of_blocks_without_content(make_runner, make_request):
    """Blocks that decodes leave behind are used up before any prefix is evicted."""
    runner = make_runner(num_blocks=12, max_num_seqs=2)
    runner.add(make_request(0, range(16), max_tokens=1))
    runner.run()
    runner.add(*(make_request(row, [500 + row], max_tokens=14) for row in range(1, 9)))
    runner.run()
    runner.add(make_request(10, range(16), max_tokens=1))
    assert runner.step() == [(10, 12, 16)]


def test_no_result_rests_on_a_hash(make_runner, make_request, monkeypatch):
    """With digests of one bit, half of all blocks collide; every answer is still right."""

    class Weak:
        def __init__(self, content: bytes, *, digest_size: int, salt: bytes) -> None:
            self.bit = (sum(content) + salt[0]) % 2

        def digest(self) -> bytes:
            return bytes([self.bit]) * chain_module.DIGEST_SIZE

    monkeypatch.setattr(chain_module, "blake2b", Weak)
    runner = make_runner(num_blocks=24, max_num_batched_tokens=16)
    requests = [make_request(row, [row % 2, row % 3, 5, 6, row % 5, *range(row % 7 + 4)], 9) for row in range(60)]
    runner.add(*requests)
    runner.run()
    assert runner.outputs == {(r.row_index, 0): runner.model.answer(r, 9) for r in requests}
