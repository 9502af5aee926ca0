"""Finding the rows that bring an engine down: on a model of an engine, with any poison, for every way of dying."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from batchjob.supervisor.protocol import Kind
from batchjob.supervisor.restart_policy import AttemptEnd, RestartPolicy
from batchjob.supervisor.suspects import Suspects


@dataclass
class Engine:
    """Rows live for `length` steps; a poisoned one kills the engine in its step number `deadly` (from 1)."""

    poison: frozenset[int]
    max_num_seqs: int
    length: int
    deadly: int

    def run(self, waiting: list[int], finished: set[int], *, one_at_a_time: bool) -> AttemptEnd | None:
        """None if all got through, else how it died."""
        ages: dict[int, int] = {}
        newest: tuple[int, ...] = ()
        waiting = [row for row in waiting if row not in finished]
        num_finished, num_steps = 0, 0
        while waiting or ages:
            room = min(1 if one_at_a_time else self.max_num_seqs, self.max_num_seqs - len(ages), len(waiting))
            if room:
                newest = tuple(waiting[:room])
                del waiting[:room]
                ages.update(dict.fromkeys(newest, 0))
            for row in ages:
                ages[row] += 1
            if any(row in self.poison and age == self.deadly for row, age in ages.items()):
                return AttemptEnd(
                    Kind.CRASH,
                    "was killed by SIGSEGV",
                    in_flight=tuple(ages),
                    newest=newest,
                    num_finished=num_finished,
                    has_computed=num_steps > 0,
                )
            num_steps += 1
            for row in [row for row, age in ages.items() if age == self.length]:
                del ages[row]
                finished.add(row)
                num_finished += 1
        return None


def attempt(
    engine: Engine, policy: RestartPolicy, rows: list[int], finished: set[int], failed: set[int]
) -> AttemptEnd | None:
    """Runs rows as a worker does with its hints."""
    orders = policy.hints()
    before = len(finished)
    accused = policy.suspects.rows
    control = [row for row in rows if row not in finished | failed | accused][-1:] if orders.suspects else []
    for group in [control, *orders.suspects] if control else orders.suspects:
        end = engine.run(list(group), finished, one_at_a_time=True)
        if end is not None:
            return with_all(end, policy, finished, len(finished) - before)
    rest = [row for row in rows if row not in failed and row not in orders.poisoned]
    end = engine.run(rest, finished, one_at_a_time=False)
    if end is None or len(finished) > before:
        failed.update(orders.poisoned)
    return end and with_all(end, policy, finished | failed, len(finished) - before)


def with_all(end: AttemptEnd, policy: RestartPolicy, done: set[int], num_finished: int) -> AttemptEnd:
    return AttemptEnd(
        end.kind,
        end.how,
        end.in_flight,
        end.newest,
        frozenset(policy.suspects.rows & done),
        num_finished,
        end.has_computed or num_finished > 0,
    )


def work_off(engine: Engine, num_rows: int) -> tuple[int, set[int], set[int], RestartPolicy]:
    """(restarts, rows finished, rows failed, the policy)."""
    policy, finished, failed = RestartPolicy(), set[int](), set[int]()
    rows = list(range(num_rows))
    for restarts in range(10_000):
        end = attempt(engine, policy, rows, finished, failed)
        if end is None:
            return restarts, finished, failed, policy
        policy.note(end)
        if policy.gave_up:
            return restarts, finished, failed, policy
    raise AssertionError("it never ends")


@given(
    poison=st.frozensets(st.integers(150, 299), max_size=3),
    max_num_seqs=st.sampled_from([1, 2, 7, 32, 128]),
    length=st.integers(1, 12),
    deadly=st.integers(1, 12),
)
def test_every_poisoned_row_is_found_and_no_other(
    poison: frozenset[int], max_num_seqs: int, length: int, deadly: int
) -> None:
    engine = Engine(poison, max_num_seqs, length, min(deadly, length))
    restarts, finished, failed, policy = work_off(engine, 300)
    assert policy.gave_up is None
    assert failed == poison
    assert finished == set(range(300)) - poison
    assert restarts <= len(poison) * (max_num_seqs.bit_length() + 3)


def test_a_row_that_kills_at_once_takes_four_restarts() -> None:
    restarts, _, failed, _ = work_off(Engine(frozenset({517}), max_num_seqs=256, length=50, deadly=1), 1000)
    assert (restarts, failed) == (4, {517})


def test_a_row_that_kills_late_takes_the_logarithm() -> None:
    restarts, _, failed, _ = work_off(Engine(frozenset({517}), max_num_seqs=256, length=50, deadly=40), 1000)
    assert restarts <= 10
    assert failed == {517}


def test_the_only_row_of_a_job_can_be_poisoned() -> None:
    restarts, finished, failed, policy = work_off(Engine(frozenset({0}), 8, 5, 1), 1)
    assert (restarts, finished, failed, policy.gave_up) == (2, set(), {0}, None)


@given(deadly=st.integers(1, 10), num_rows=st.integers(5, 400), max_num_seqs=st.sampled_from([4, 64, 256]))
def test_an_engine_that_kills_every_row_is_given_up_and_no_row_blamed(
    deadly: int, num_rows: int, max_num_seqs: int
) -> None:
    engine = Engine(frozenset(range(num_rows)), max_num_seqs, length=10, deadly=deadly)
    restarts, finished, failed, policy = work_off(engine, num_rows)
    assert policy.gave_up
    assert not finished
    assert not failed
    assert restarts <= (2 if num_rows > 2 * max_num_seqs else 20)


def test_groups_halve() -> None:
    suspects = Suspects()
    suspects.accuse(range(100), range(100), "died")
    assert sorted(map(len, suspects.groups)) == [50, 50]
    group = suspects.groups[0]
    while len(group) > 1:
        assert suspects.accuse(group, group, "died")
        parts = [part for part in suspects.groups if set(part) <= set(group)]
        assert suspects.groups[-len(parts) :] == parts
        assert max(map(len, parts)) <= (len(group) + 1) // 2
        group = parts[0]


def test_the_newest_rows_are_tried_first_and_the_others_halved_all_the_same() -> None:
    suspects = Suspects()
    suspects.accuse(range(11), [10], "died")
    assert suspects.groups == [[10], [5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]


def test_a_finished_row_is_no_suspect_any_more() -> None:
    suspects = Suspects()
    suspects.accuse([1, 2, 3, 4], [], "died")
    suspects.clear({3, 4})
    assert suspects.groups == [[1, 2]]
    suspects.clear({1, 2})
    assert suspects.groups == []


def test_a_row_that_died_alone_once_is_tried_again_behind_the_others() -> None:
    suspects = Suspects()
    suspects.accuse([1, 2, 3], [3], "died")
    suspects.accuse([3], [3], "died")
    assert suspects.groups == [[2], [1], [3]]
    suspects.clear({1, 2})
    suspects.accuse([3], [3], "died again")
    assert (suspects.groups, suspects.poisoned) == ([], {3: "died again"})


@given(
    first=st.integers(0, 290),
    size=st.integers(1, 10),
    max_num_seqs=st.sampled_from([16, 32, 128]),
    length=st.integers(1, 6),
    deadly=st.integers(1, 6),
)
def test_bad_rows_that_are_neighbours_are_all_found(
    first: int, size: int, max_num_seqs: int, length: int, deadly: int
) -> None:
    poison = frozenset(range(first, first + size))
    restarts, finished, failed, policy = work_off(Engine(poison, max_num_seqs, length, min(deadly, length)), 400)
    assert policy.gave_up is None
    assert failed == poison
    assert finished == set(range(400)) - poison
    assert restarts <= size * (max_num_seqs.bit_length() + 3)
