"""Which leading blocks are read together, and in which order slices are laid out for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.core.sequence import Sequence
from batchjob.core.step_plan import Slice, StepPlan
from batchjob.engine.steps import prefix_groups as layout
from batchjob.engine.steps.prefix_groups import PrefixGroups
from batchjob.records import Request
from batchjob.sampling import SamplingParams
from batchjob_kernels import Context

SIZE = 4


def slice_of(blocks: list[int], num_before: int, num_new: int = 1) -> Slice:
    """`num_new` tokens after `num_before` others, over a block table that starts with `blocks`."""
    length = num_before + num_new
    seq = Sequence(Request(0, 0, [7] * length, SamplingParams(), stream=0), max_len=length + 9)
    own = -(-length // SIZE) - len(blocks)
    seq.blocks = blocks + list(range(1000 + id(seq) % 10**6, 1000 + id(seq) % 10**6 + max(0, own)))
    return Slice(seq, num_before, length)


@pytest.fixture(autouse=True)
def _low_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MIN_TOKENS_SAVED", 2 * SIZE)


def arrange(slices: list[Slice]) -> tuple[list[int], list[Context]]:
    return PrefixGroups(SIZE).arrange(StepPlan([], slices))


def test_rows_without_common_blocks_are_sorted_by_length_with_prompt_parts_last() -> None:
    slices = [slice_of([1], 30), slice_of([2], 0, 5), slice_of([3], 10), slice_of([4], 20)]
    assert arrange(slices) == ([2, 3, 0, 1], [])


def test_rows_of_one_prefix_become_neighbours_and_read_it_together() -> None:
    slices = [slice_of([1, 2, 3], 14), slice_of([9], 8), slice_of([1, 2, 3], 12), slice_of([1, 2, 3], 13, 6)]
    order, contexts = arrange(slices)
    assert order == [1, 2, 0, 3]
    assert contexts == [Context(1, 4, 0, 3)]


def test_blocks_that_a_row_is_still_computing_are_not_shared() -> None:
    slices = [slice_of([1, 2, 3], 9, 3), slice_of([1, 2, 3], 13), slice_of([1, 2, 3], 14)]
    order, contexts = arrange(slices)
    assert contexts == [Context(0, 3, 0, 2)]
    assert order == [1, 2, 0]


def test_a_prefix_within_a_prefix_is_read_on_its_own() -> None:
    long, short = [1, 2, 3, 4], [1, 2]
    slices = [slice_of(long, 17), slice_of(short, 9), slice_of(long, 18), slice_of(short, 10), slice_of(long, 16)]
    order, contexts = arrange(slices)
    assert order == [1, 3, 4, 0, 2]
    assert contexts == [Context(0, 5, 0, 2), Context(2, 5, 2, 4)]


def test_what_saves_little_is_not_worth_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MIN_TOKENS_SAVED", 2 * SIZE + 1)
    assert arrange([slice_of([1, 2], 9), slice_of([1, 2], 10)])[1] == []


def test_a_decode_step_of_the_same_rows_is_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = PrefixGroups(SIZE)
    slices = [slice_of([1, 2, 3], 14), slice_of([1, 2, 3], 12), slice_of([1, 2, 3], 13)]
    first = prefixes.arrange(StepPlan(slices))
    monkeypatch.setattr(prefixes, "_arrange", lambda plan: pytest.fail("worked out again"))
    for slice_ in slices:
        slice_.seq.tokens.append(7)
    again = [Slice(slice_.seq, slice_.stop, slice_.stop + 1) for slice_ in slices]
    assert prefixes.arrange(StepPlan(again)) == first
    monkeypatch.setattr(prefixes, "_arrange", lambda plan: ([], []))
    again[0].seq.num_preemptions += 1
    assert prefixes.arrange(StepPlan(again)) == ([], [])


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 30), st.integers(1, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_contexts_hold_only_blocks_that_all_their_rows_have_before_their_queries(
    rows: list[tuple[list[int], int, int]],
) -> None:
    # A block id names its whole prefix, as in a real pool.
    def ids(path: list[int]) -> list[int]:
        return [int("1" + "".join(map(str, path[: n + 1])), 2) for n in range(len(path))]

    slices = [slice_of(ids(path), before, new) for path, before, new in rows]
    order, contexts = arrange(slices)
    assert sorted(order) == list(range(len(slices)))
    covered = [0] * len(slices)
    for context in contexts:
        members = order[context.first_seq : context.last_seq]
        assert len({tuple(slices[row].seq.blocks[: context.last_block]) for row in members}) == 1
        for row in members:
            assert covered[row] == context.first_block
            covered[row] = context.last_block
            assert context.last_block * SIZE <= slices[row].start
