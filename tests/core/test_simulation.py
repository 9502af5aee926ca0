"""Thousands of rows through pools of very different sizes."""

import random

import pytest


def make_rows(make_request, num_rows, *, seed=0):
    """Short and long prompts in groups with a shared prefix, one to three samples each, outputs of 1 to 60 tokens."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(50) for _ in range(length)] for length in (0, 0, 3, 17, 40)]
    requests = []
    for row in range(num_rows):
        token_ids = rng.choice(prefixes) + [rng.randrange(50) for _ in range(rng.randint(1, 30))]
        max_tokens, n = min(60, 1 + int(rng.expovariate(1 / 12))), rng.choice([1, 1, 1, 3])
        requests += [make_request(row, token_ids, max_tokens, sample=sample, n=n) for sample in range(n)]
    return requests


def num_tokens_to_run(requests, scheduler):
    """By the scheduler's own counters. The last token of a row is never run."""
    assert scheduler.num_recomputed_tokens >= 0
    num_tokens = sum(len(r.token_ids) + r.params.max_tokens - 1 for r in requests)
    return num_tokens - scheduler.num_cached_tokens + scheduler.num_recomputed_tokens


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_results_do_not_depend_on_the_size_of_the_pool(make_runner, make_request, prefix_caching):
    requests = make_rows(make_request, 300)
    outputs, num_preemptions = [], []
    for num_blocks, limits in [(4000, (64, 256)), (60, (64, 256)), (35, (16, 32)), (33, (3, 5))]:
        max_num_seqs, max_num_batched_tokens = limits
        runner = make_runner(
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
        )
        runner.add(*requests)
        outputs.append(runner.run().outputs)
        num_preemptions.append(runner.scheduler.num_preemptions)
        assert runner.model.num_tokens == num_tokens_to_run(requests, runner.scheduler)
    answers = {(r.row_index, r.sample_index): runner.model.answer(r, r.params.max_tokens) for r in requests}
    assert all(found == answers for found in outputs)
    assert num_preemptions[0] == 0
    assert num_preemptions[1] > 20


def test_thousands_of_rows_fill_the_steps(make_runner, make_request):
    """A floor under throughput: steps stay full, little is computed twice, and prefixes are computed once."""
    requests = make_rows(make_request, 4000)
    runner = make_runner(1200, max_num_seqs=128, max_num_batched_tokens=512, checked=False)
    runner.add(*requests)
    runner.run()
    scheduler = runner.scheduler
    assert len(runner.outputs) == len(requests)
    num_output_tokens = sum(map(len, runner.outputs.values()))
    assert num_output_tokens / runner.num_steps > 0.85 * 128  # tokens sampled per step, of at most one per slot
    num_prompt_tokens = sum(len(r.token_ids) for r in requests)
    assert scheduler.num_prompt_tokens_computed < 0.65 * num_prompt_tokens
    assert runner.model.num_tokens == num_tokens_to_run(requests, scheduler)
    assert scheduler.num_recomputed_tokens < 0.02 * runner.model.num_tokens


def test_a_tight_pool_costs_little_more_than_the_work_itself(make_runner, make_request):
    requests = [make_request(row, range(row, row + 20), 100) for row in range(400)]
    runner = make_runner(200, 8, max_num_seqs=64, max_num_batched_tokens=256, checked=False)
    runner.add(*requests)
    runner.run()
    assert len(runner.outputs) == 400
    assert runner.scheduler.num_preemptions > 50
    assert runner.scheduler.num_recomputed_tokens < 0.25 * runner.model.num_tokens
    most_at_once = 200 * 8 / (20 + 100 / 2)
    assert 400 * 100 / runner.num_steps > 0.75 * most_at_once
