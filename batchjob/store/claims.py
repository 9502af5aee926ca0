"""Claims on chunks, for processes that share all chunks of a job: a process claims a chunk before it works on it. No
row depends on it.

`claims/CHUNK` is a directory that holds one file with the name of its attempt. A claim is stale when its attempt is
over, or when the attempt's counter has stood still while it was watched; any process may then take it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from batchjob.store.attempts import read_attempt
from batchjob.store.context import StoreContext
from batchjob.store.disk_errors import storage_errors
from batchjob.store.liveness import Watch, is_over
from batchjob.store.publish import Claim


def claim_name(chunk_index: int) -> str:
    return f"{chunk_index:08d}"


class ChunkClaims:
    """The claims of one attempt. `take` and `judge` raise StorageError; `release` and `close` never fail."""

    def __init__(
        self,
        context: StoreContext,
        own: Mapping[str, Any],
        keeps: Callable[[Mapping[str, Any] | None], bool] = lambda record: False,
    ) -> None:
        """`own` is the record of this attempt. `keeps` tells from the record of another attempt whether its
        claims hold even if it is over, because a successor will take them over."""
        self._context = context
        self._own = own
        self._keeps = keeps
        self._held: dict[int, Claim] = {}
        self._watches: dict[str, Watch] = {}
        self._stale: set[str] = set()

    def take(self, index: int) -> bool:
        """Claims a chunk, unless another attempt that is not known to be over has it. True for its own claim."""
        if index in self._held:
            return True
        layout = self._context.layout
        claim = Claim(self._context.fs, layout.claims, claim_name(index), self._context.attempt)
        with storage_errors("claiming", layout.claims):
            if not claim.try_acquire(is_dead=self._is_stale):
                return False
        self._held[index] = claim
        return True

    def release(self, index: int) -> None:
        claim = self._held.pop(index, None)
        try:
            if claim is not None:
                claim.release()
        except OSError:
            pass  # the next start sweeps it

    def close(self) -> None:
        """Releases the claims on chunks that are not committed, for others to take at once."""
        for index in list(self._held):
            self.release(index)

    def holders(self) -> dict[int, str]:
        """The claimed chunks and their attempts, our own left out. Raises StorageError."""
        fs, claims = self._context.fs, self._context.layout.claims
        found: dict[int, str] = {}
        with storage_errors("reading", claims):
            for name in fs.listdir(claims):
                if not name.isdigit() or int(name) in self._held:
                    continue
                try:
                    holders = fs.listdir(claims / name)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                found.update((int(name), holder) for holder in holders)
        return found

    def judge(self, attempts: Iterable[str]) -> dict[str, bool | None]:
        """True for each attempt that lives, False for a dead one; None for one that is watched since the first call,
        which was too short ago to tell."""
        verdicts: dict[str, bool | None] = {}
        for attempt in set(attempts):
            if self._is_stale(attempt):
                verdicts[attempt] = False
                continue
            if self._over(attempt) is False:
                verdicts[attempt] = True
                continue
            watch = self._watches.setdefault(attempt, Watch(self._context, attempt))
            verdicts[attempt] = watch.verdict()
            if verdicts[attempt] is False:
                self._stale.add(attempt)
        return verdicts

    def is_kept(self, attempt: str) -> bool:
        """True if the claims of an attempt are kept for its successor."""
        return self._keeps(self._record(attempt))

    def _is_stale(self, attempt: str) -> bool:
        return attempt in self._stale or self._over(attempt) is True

    def _over(self, attempt: str) -> bool | None:
        record = self._record(attempt)
        return False if self._keeps(record) else is_over(record, self._own)

    def _record(self, attempt: str) -> Mapping[str, Any] | None:
        return read_attempt(self._context.fs, self._context.layout.attempt(attempt))
