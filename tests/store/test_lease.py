"""The lease of a shard: who is refused, who takes over, who is watched, and who learns that it was superseded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchjob.errors import OutputBusyError
from batchjob.store import Store, liveness
from batchjob.store.lease import Lease, overlap
from batchjob.store.paths import Layout

BEAT = 0.1


@pytest.fixture(autouse=True)
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_SECONDS", BEAT)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts look as if they ran on other machines."""
    monkeypatch.setattr("batchjob.store.liveness.is_alive", lambda record: None)


class Holders:
    """Leases on one output, all closed at the end."""

    def __init__(self, kit: Any, output: Path) -> None:
        self.output = output
        plan = kit.make_plan(12, 3)
        Store.create(output, kit.make_manifest(plan), plan)
        self._open: list[Lease] = []

    def lease(self, shard: tuple[int, int] = (0, 1), **info: Any) -> Lease:
        store = Store.open(self.output)
        store.start_attempt(info)
        lease = store.lease(shard)
        self._open.append(lease)
        return lease

    def hold(self, shard: tuple[int, int] = (0, 1), **info: Any) -> Lease:
        lease = self.lease(shard, **info)
        lease.acquire()
        return lease

    def crash(self, lease: Lease) -> None:
        """Its counter stops, and nothing is given back."""
        lease._held = False
        lease.close()

    def close(self) -> None:
        for lease in self._open:
            lease.close()

    def names(self) -> list[str]:
        return sorted(path.name for path in Layout(self.output).leases.iterdir())


@pytest.fixture
def holders(kit: Any, output: Path) -> Iterator[Holders]:
    found = Holders(kit, output)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ((0, 1), (0, 1), True),
        ((0, 4), (1, 4), False),
        ((3, 4), (0, 1), True),
        ((0, 4), (1, 3), True),
        ((1, 4), (0, 2), False),
        ((1, 4), (3, 6), True),
    ],
)
def test_shards_overlap_where_they_have_a_chunk_in_common(
    one: tuple[int, int], other: tuple[int, int], common: bool
) -> None:
    chunks = range(one[1] * other[1])
    assert common == any(c % one[1] == one[0] and c % other[1] == other[0] for c in chunks)
    assert overlap(one, other) == overlap(other, one) == common


def test_a_second_process_is_refused_while_the_first_lives(holders: Holders) -> None:
    first = holders.hold()
    with pytest.raises(OutputBusyError, match=r"process \d+ on .* works on .*--no-lease") as caught:
        holders.hold()
    assert caught.value.exit_code == 69
    first.check()
    first.close()
    holders.hold().check()


def test_another_shard_is_not_refused_but_an_overlapping_one_is(holders: Holders) -> None:
    holders.hold((1, 4))
    holders.hold((2, 4))
    with pytest.raises(OutputBusyError, match="shard 0 of 3"):
        holders.hold((0, 3))
    assert holders.names() == ["1-of-4.json", "2-of-4.json"]


def test_the_lease_of_a_dead_process_is_taken_at_once(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    first = holders.hold((1, 4))
    holders.crash(first)
    monkeypatch.setattr("batchjob.store.liveness.is_alive", lambda record: False)
    second = holders.hold((0, 1))
    second.check()
    assert holders.names() == ["0-of-1.json"], "the lease of another division goes with its holder"


def test_an_attempt_that_noted_its_end_is_over(holders: Holders, elsewhere: None) -> None:
    holders.crash(holders.hold(ended={"by": "SIGTERM"}))
    holders.hold().check()
    assert holders.names() == ["0-of-1.json"]


def test_a_holder_elsewhere_whose_counter_stands_still_is_replaced(holders: Holders, elsewhere: None) -> None:
    holders.crash(holders.hold())
    second = holders.hold()
    began = time.monotonic()
    second.settle()
    assert BEAT < time.monotonic() - began < 20 * BEAT, "two beats are watched"
    second.check()
    third = holders.hold()
    with pytest.raises(OutputBusyError):
        third.settle()


def test_time_spent_loading_counts_as_watching(holders: Holders, elsewhere: None) -> None:
    holders.crash(holders.hold())
    second = holders.hold()
    time.sleep(2.5 * BEAT)
    began = time.monotonic()
    second.settle()
    assert time.monotonic() - began < BEAT


def test_a_holder_elsewhere_whose_counter_moves_keeps_its_lease(holders: Holders, elsewhere: None) -> None:
    first = holders.hold()
    second = holders.hold()
    with pytest.raises(OutputBusyError, match="works on"):
        second.settle()
    first.check()


def test_a_stop_ends_the_watching_without_the_lease(holders: Holders, elsewhere: None) -> None:
    first = holders.hold()
    second = holders.hold()
    second.settle(give_up=lambda: True)
    second.close()
    first.check()


@pytest.mark.parametrize(
    ("before", "now", "at_once"),
    [
        ({"task": "7_1", "restart": 0}, {"task": "7_1", "restart": 1}, True),
        ({"task": "7_1", "restart": 1}, {"task": "7_1", "restart": 1}, False),
        ({"task": "7_1", "restart": 0}, {"task": "7_2", "restart": 1}, False),
        ({"task": None, "restart": 0}, {"task": None, "restart": 1}, False),
        (None, {"task": "7_1", "restart": 1}, False),
    ],
)
def test_a_requeued_task_takes_over_from_itself(
    holders: Holders, elsewhere: None, before: Any, now: Any, at_once: bool
) -> None:
    first = holders.hold(slurm=before)
    second = holders.hold(slurm=now)
    if at_once:
        second.check()
        with pytest.raises(OutputBusyError, match="taken over"):
            first.check()
    else:
        first.check()
        with pytest.raises(OutputBusyError, match="works on"):
            second.settle()


def test_a_process_on_this_host_is_not_superseded_by_a_restart_count(holders: Holders) -> None:
    holders.hold(slurm={"task": "7_1", "restart": 0})
    with pytest.raises(OutputBusyError):
        holders.hold(slurm={"task": "7_1", "restart": 1})


def test_a_superseded_process_is_told_and_leaves_the_lease_alone(holders: Holders, elsewhere: None) -> None:
    lost = threading.Event()
    zombie = holders.lease(slurm={"task": "7", "restart": 0})
    zombie.acquire(on_lost=lost.set)
    second = holders.hold(slurm={"task": "7", "restart": 1})
    assert lost.wait(50 * BEAT)
    with pytest.raises(OutputBusyError, match="looked dead"):
        zombie.check()
    zombie.close()
    second.check()


def test_of_two_that_take_over_at_once_one_keeps_the_lease(holders: Holders, elsewhere: None) -> None:
    holders.crash(holders.hold())
    second, third = holders.hold(), holders.hold()
    second.settle()
    with pytest.raises(OutputBusyError, match="works on"):
        third.settle()  # the first holder is over, but by now there is a second
    second.check()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"attempt": 5}', '{"attempt": "../x"}'])
def test_a_damaged_lease_is_replaced(holders: Holders, text: str) -> None:
    layout = Layout(holders.output)
    (layout.leases / "0-of-1.json").write_text(text)
    (layout.leases / "README").write_text("not a lease")
    holders.hold().check()


def test_a_beat_leaves_what_was_noted(kit: Any, holders: Holders) -> None:
    import json

    lease = holders.hold(shard=(0, 1), versions="1.2")
    record = Layout(holders.output).attempt(lease._context.attempt)
    deadline = time.monotonic() + 100 * BEAT
    while "beats" not in (noted := json.loads(record.read_text())):
        assert time.monotonic() < deadline
        time.sleep(BEAT / 4)
    assert noted["versions"] == "1.2"
    assert noted["pid"]


def test_a_full_disk_does_not_stop_the_counter_for_good(kit: Any, holders: Holders) -> None:
    """A note that could not be written leaves nothing in the way of the next."""
    import errno

    from batchjob.errors import StorageError

    fs = kit.FaultyFs(only=["write"], error=errno.ENOSPC)
    store = Store.open(holders.output, fs=fs)
    store.start_attempt({})
    fs.at = fs.count
    with pytest.raises(StorageError):
        store.note_attempt({"beats": 1})
    store.note_attempt({"beats": 2})
    assert json.loads(Layout(holders.output).attempt(store.attempt).read_text())["beats"] == 2
