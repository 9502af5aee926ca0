"""`PendingPrefixes`: which prefix blocks are being computed right now, and which rows wait for that."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from batchjob.core.sequence import Sequence


class PendingPrefixes:
    """A waiting row whose next block a running sequence is about to compute is *parked* here, out of the queue.

    It waits for the last block that both have in common, so it is woken once, to hit them all. Since an owner either
    computes its pending blocks or withdraws them when it is preempted or finished, no row stays parked for ever.
    """

    def __init__(self) -> None:
        self._owners: dict[bytes, Sequence] = {}  # digest of a pending block -> the sequence that will compute it
        self._parked: dict[bytes, list[Sequence]] = {}  # digest of a pending block -> rows that wait for it, in order
        self.num_parked = 0

    def announce(self, seq: Sequence, digests: Iterable[bytes]) -> None:
        """`seq` is going to compute these blocks, one after the other."""
        for digest in digests:
            self._owners.setdefault(digest, seq)

    def last_common(self, digests: Iterable[bytes]) -> bytes | None:
        """The last of the leading run of `digests` that is pending; None if the first one is not."""
        last = None
        for digest in digests:
            if digest not in self._owners:
                break
            last = digest
        return last

    def park(self, seq: Sequence, digest: bytes) -> None:
        """Sets a waiting row aside until the pending block `digest` is settled."""
        self._parked.setdefault(digest, []).append(seq)
        self.num_parked += 1

    def settle(self, seq: Sequence, digests: Iterable[bytes]) -> list[Sequence]:
        """`seq` has computed these blocks, or never will. Returns the rows that waited for them, in order."""
        woken: list[Sequence] = []
        for digest in digests:
            if self._owners.get(digest) is seq:
                del self._owners[digest]
                woken += self._parked.pop(digest, ())
        self.num_parked -= len(woken)
        return woken

    def drain(self) -> list[Sequence]:
        """Takes out every parked row."""
        parked = [seq for group in self._parked.values() for seq in group]
        self._parked.clear()
        self.num_parked = 0
        return parked

    def check(self, running: Collection[Sequence]) -> None:
        """Asserts the invariants. For tests."""
        for digest, owner in self._owners.items():
            assert owner in running
            assert owner.chain is not None
            assert digest in owner.chain.digests[owner.chain.num_registered :]
        assert self._parked.keys() <= self._owners.keys()
        assert all(self._parked.values())
        assert self.num_parked == sum(map(len, self._parked.values()))
