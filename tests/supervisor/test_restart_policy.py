"""After an attempt that came down: a restart, smaller limits, another machine, or the end."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from batchjob.supervisor.protocol import Kind
from batchjob.supervisor.restart_policy import MAX_BACKOFF, MAX_POISONED, AttemptEnd, RestartPolicy


def died(**more: Any) -> AttemptEnd:
    return AttemptEnd(**{"kind": Kind.CRASH, "how": "was killed by SIGSEGV", **more})


def killed(**more: Any) -> AttemptEnd:
    return died(signal=signal.SIGKILL, how="was killed by SIGKILL", **more)


@pytest.mark.parametrize("kind", [Kind.CRASH, Kind.HANG])
def test_three_attempts_in_a_row_without_anything_are_the_end(kind: Kind) -> None:
    policy = RestartPolicy()
    for _ in range(2):
        policy.note(died(kind=kind))
        assert policy.gave_up is None
    policy.note(died(kind=kind))
    assert policy.gave_up == "3 attempts in a row came down without finishing a row"


def test_a_finished_row_starts_the_count_again() -> None:
    policy = RestartPolicy()
    for _ in range(20):
        policy.note(died())
        policy.note(died())
        policy.note(died(num_finished=1))
    assert policy.gave_up is None


def test_a_smaller_group_starts_the_count_again_only_if_the_engine_computed() -> None:
    policy = RestartPolicy()
    policy.note(died(in_flight=tuple(range(64))))
    for _ in range(5):
        policy.note(died(in_flight=policy.hints().suspects[0]))
        assert policy.gave_up is None
    policy = RestartPolicy()
    policy.note(died(in_flight=tuple(range(64)), has_computed=False))
    policy.note(died(in_flight=policy.hints().suspects[0], has_computed=False))
    policy.note(died(in_flight=policy.hints().suspects[0], has_computed=False))
    assert policy.gave_up


def test_memory_halves_the_limits_and_blames_no_row() -> None:
    policy = RestartPolicy()
    for memory_backoff in range(1, MAX_BACKOFF + 1):
        policy.note(died(kind=Kind.MEMORY, in_flight=(1, 2, 3)))
        assert (policy.hints().memory_backoff, policy.hints().suspects) == (memory_backoff, ())
    assert policy.gave_up is None
    policy.note(died(kind=Kind.MEMORY, in_flight=(1, 2, 3)))
    assert policy.hints().memory_backoff == MAX_BACKOFF
    assert policy.hints().suspects


def test_a_second_kill_that_no_row_explains_is_memory() -> None:
    """The kernel's counters may be out of sight: but each row got through alone, so it is all of them together."""
    policy = RestartPolicy()
    policy.note(killed(in_flight=(1, 2, 3)))
    assert (policy.memory_backoff, policy.hints().suspects) == (0, ((3,), (1, 2)))
    policy.note(killed(cleared=frozenset({1, 2, 3}), num_finished=3, in_flight=(4, 5, 6)))
    assert (policy.memory_backoff, policy.hints().suspects) == (1, ())
    policy.note(killed(num_finished=9, in_flight=(7, 8)))
    assert (policy.memory_backoff, policy.hints().suspects) == (1, ((8,), (7,)))


def test_a_kill_that_a_row_explains_is_not_memory() -> None:
    policy = RestartPolicy()
    policy.note(killed(in_flight=(1,)))
    policy.note(killed(in_flight=(1,)))
    assert list(policy.hints().poisoned) == [1]
    policy.note(killed(cleared=frozenset({1}), num_finished=5, in_flight=(9, 10)))
    assert (policy.memory_backoff, policy.hints().suspects) == (0, ((10,), (9,)))


def test_a_device_that_fails_twice_without_a_row_is_for_another_machine() -> None:
    policy = RestartPolicy()
    policy.note(died(kind=Kind.DEVICE, num_finished=4))
    policy.note(died(kind=Kind.DEVICE))
    assert not policy.device_lost
    policy.note(died(kind=Kind.DEVICE))
    assert policy.device_lost
    assert policy.gave_up


def test_too_many_rows_that_bring_it_down_are_the_end() -> None:
    policy = RestartPolicy()
    for row in range(MAX_POISONED + 1):
        assert policy.gave_up is None
        policy.note(died(in_flight=(row,), num_finished=1))
        policy.note(died(in_flight=(row,), num_finished=1))
        policy.suspects.clear({row})
    assert policy.gave_up


def test_rows_that_all_die_alone_with_none_in_between_are_the_end() -> None:
    policy = RestartPolicy()
    for row in range(4):
        assert policy.gave_up is None
        policy.note(died(in_flight=(row,), has_computed=False))
        policy.note(died(in_flight=(row,), has_computed=False))
    assert policy.gave_up
    assert "none got through" in policy.gave_up
