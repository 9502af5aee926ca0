from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.core import ORDERS, arrange
from batchjob.records import Request
from batchjob.sampling import SamplingParams


def rows(requests: list[Request]) -> list[int]:
    return [request.row_index for request in requests]


@pytest.fixture
def window(make_request) -> list[Request]:
    prefix_a, prefix_b = [1] * 4, [2] * 4
    prompts = [[9, 9], [*prefix_a, 1], [*prefix_b, 1], [*prefix_a, 2, 2, 2], [8, 8, 8], [*prefix_b, 3, 3], [7] * 6]
    return [make_request(row, prompt) for row, prompt in enumerate(prompts)]


def test_input_keeps_the_order(window):
    assert rows(arrange(window, "input", block_size=4)) == [0, 1, 2, 3, 4, 5, 6]


def test_length_starts_the_longest_first(window):
    assert rows(arrange(window, "length", block_size=4)) == [3, 5, 6, 1, 2, 4, 0]


def test_prefix_puts_groups_together_in_order_of_appearance(window):
    assert rows(arrange(window, "prefix", block_size=4)) == [0, 4, 6, 1, 3, 2, 5]


def test_auto_starts_the_longest_of_each_group_first(window):
    assert rows(arrange(window, "auto", block_size=4)) == [6, 4, 0, 3, 1, 5, 2]


def test_auto_is_the_default(window):
    assert arrange(window, block_size=4) == arrange(window, "auto", block_size=4)


def test_groups_with_a_longer_common_prefix_lie_inside_their_group(make_request):
    system, doc_a, doc_b = [0] * 4, [1] * 8, [2] * 8
    prompts = [[*doc_a, 1], system + doc_a + [1], system + doc_b + [1], system + doc_a + [2], system + doc_b + [2]]
    requests = [make_request(row, prompt) for row, prompt in enumerate(prompts)]
    assert rows(arrange(requests, "prefix", block_size=4)) == [0, 1, 3, 2, 4]


def test_the_allowed_output_counts_as_length(make_request):
    requests = [make_request(0, [1] * 9, max_tokens=1), make_request(1, [2], max_tokens=50), make_request(2, [3], None)]
    assert rows(arrange(requests, "length")) == [2, 1, 0]


def test_samples_of_a_row_stay_together(make_request):
    prompts = [[row] * 20 for row in range(5)]
    requests = [make_request(row, prompts[row], sample=sample, n=3) for sample in range(3) for row in range(5)]
    for order in ("auto", "prefix"):
        found = arrange(requests, order)
        assert [request.sample_index for request in found] == [0, 1, 2] * 5
        assert rows(found)[::3] == [0, 1, 2, 3, 4]


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="auto, input, prefix, length"):
        arrange([], "random")


PARAMS = SamplingParams(max_tokens=4)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=30),
    order=st.sampled_from(ORDERS),
    block_size=st.integers(1, 4),
)
def test_every_request_comes_out_once_and_groups_are_whole(prompts, order, block_size):
    requests = [Request(row, 0, prompt, PARAMS, row) for row, prompt in enumerate(prompts)]
    found = arrange(requests, order, block_size=block_size)
    assert sorted(rows(found)) == list(range(len(prompts)))
    if order in ("auto", "prefix"):
        for num_tokens in range(block_size, 13, block_size):
            prefixes = [tuple(r.token_ids[:num_tokens]) for r in found if len(r.token_ids) >= num_tokens]
            changes = sum(a != b for a, b in pairwise(prefixes))
            assert changes == max(0, len(set(prefixes)) - 1)
