"""The rows of a job that are done, by the messages of several workers."""

from __future__ import annotations

from batchjob.supervisor.job_rows import JobRows


def test_rows_are_counted_once_whichever_worker_tells() -> None:
    rows = JobRows(lambda index: index % 2 == 0)
    assert not rows.is_complete
    rows.share(60, 20)  # chunks 0, 2, 4 of 20 rows, the first of them in a part
    rows.opened(2, 40, 20, 5)
    rows.finished([45, 46])
    rows.share(60, 27)  # of a worker that came later
    assert (rows.rows_total, rows.rows_done, rows.rows_reused) == (60, 27, 25)
    rows.opened(2, 40, 20, 7)  # taken up again after a restart
    rows.opened(3, 60, 20, 0)  # of another shard
    rows.finished([60, 47])
    assert (rows.rows_total, rows.rows_done, rows.rows_reused) == (80, 29, 25)
    rows.finished([*range(48, 60), *range(61, 80)])
    rows.opened(4, 80, 20, 20)
    assert (rows.rows_done, rows.rows_reused, rows.is_complete) == (80, 45, True)


def test_at_the_end_all_rows_are_done_or_with_others() -> None:
    for is_complete, number in ((True, 60), (False, 21)):
        rows = JobRows(lambda index: True)
        rows.share(60, 20)
        rows.opened(1, 20, 20, 0)
        rows.finished([20])
        rows.close(is_complete=is_complete)
        assert (rows.rows_total, rows.rows_done, rows.rows_reused) == (number, number, 20)
