"""A worker as its messages tell of it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchjob.supervisor.protocol import Kind, end_line, rows_line
from batchjob.supervisor.worker_state import WorkerState

TEXT = (
    "phase load\n"
    'attempt ["a1", "/out/.batchjob/attempts"]\n'
    "phase run\n"
    + rows_line("+", [4, 5, 6])
    + rows_line("+", [7])
    + rows_line("-", [5, 9])
    + ". 30 12\n"
    + end_line(Kind.MEMORY, 70, "no\nroom")
).encode()


@given(st.lists(st.integers(0, len(TEXT)), max_size=6))
def test_lines_may_come_in_any_pieces(cuts: list[int]) -> None:
    worker = WorkerState(suspects=[5, 6])
    edges = [0, *sorted(cuts), len(TEXT)]
    for start, stop in pairwise(edges):
        worker.feed(TEXT[start:stop])
    assert (worker.phase, worker.attempt, str(worker.directory)) == ("run", "a1", "/out/.batchjob/attempts")
    assert (list(worker.in_flight), worker.newest, worker.cleared) == ([4, 6, 7], (7,), {5})
    assert (worker.num_finished, worker.prompt_tokens, worker.output_tokens) == (2, 30, 12)
    assert worker.end == (Kind.MEMORY, 70, "no\nroom")


def test_a_line_that_a_kill_cut_off_counts_for_nothing() -> None:
    worker = WorkerState()
    worker.feed(b"phase run\n+ 1 2\n+ 3 4")
    assert list(worker.in_flight) == [1, 2]


def test_the_engine_has_computed_once_something_follows_its_first_rows() -> None:
    worker = WorkerState()
    worker.feed(b"phase run\n. 0 0\n+ 1 2\n")
    assert not worker.has_computed
    worker.feed(b"+ 3\n")
    assert worker.has_computed
