"""The parts that are there: which chunks have one, and what their footers count."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from batchjob.errors import StorageError
from batchjob.plan import Chunk, JobPlan
from batchjob.store.context import StoreContext
from batchjob.store.counts import RowCounts
from batchjob.store.disk_errors import storage_errors
from batchjob.store.parts import BadPartError, PartInfo
from batchjob.store.paths import chunk_of_part
from batchjob.store.reread import reread

_FOOTER_THREADS = 8
_SILLY_RENAME = ".nfs"  # what NFS makes of a removed file that is still open somewhere


class Catalog:
    """Knows the valid parts of a job. Each footer is read once; a part that is bad goes to quarantine (with `repair`),
    its chunk is open again, and `warnings` says so."""

    def __init__(self, context: StoreContext, plan: JobPlan, warnings: list[str], *, repair: bool = True) -> None:
        # A plan without rows still gives one part, which carries the schema.
        self.chunks: tuple[Chunk, ...] = plan.chunks or (Chunk(0, 0, 0, ()),)
        self.totals = RowCounts()  # over the parts in `committed`
        self.committed: set[int] = set()
        self._by_index = {chunk.index: chunk for chunk in self.chunks}
        self._num_extensions = plan.num_extensions
        self._context = context
        self._warnings = warnings
        self._repair = repair
        self._met: set[str] = set()  # foreign names already reported

    def __contains__(self, index: int) -> bool:
        return index in self._by_index

    def chunk(self, index: int) -> Chunk:
        return self._by_index[index]

    def note(self, index: int, counts: RowCounts) -> None:
        """Adds a part that is known to be good."""
        if index not in self.committed:
            self.committed.add(index)
            self.totals.add(counts)

    def names(self) -> dict[int, str]:
        """The parts in data/ by name alone: chunk index and name. Raises StorageError."""
        data = self._context.layout.data
        with storage_errors("listing", data):
            names = reread(lambda: self._context.fs.listdir(data))
        found: dict[int, str] = {}
        for name in names:
            index = chunk_of_part(name)
            if index in self._by_index and name == self._context.layout.part(index).name:
                found[index] = name
            elif name not in self._met and not name.startswith(_SILLY_RENAME):
                self._met.add(name)
                if index is None or index < len(self.chunks) or not self._is_outdated():
                    self._warnings.append(
                        f"{data / name} is no part of this job and may confuse readers. Move it away."
                    )
        return found

    def _is_outdated(self) -> bool:
        """True if another process has extended the job since its plan was read here."""
        newer = self._context.layout.extension(self._num_extensions + 1)
        with storage_errors("looking for", newer):
            return self._context.fs.exists(newer)

    def scan(self) -> set[int]:
        """The chunks that have a valid part. Raises StorageError."""
        for index, info in self._read(sorted(self.names().keys() - self.committed)):
            self.note(index, info.counts)
        return set(self.committed)

    def verify(self) -> RowCounts:
        """Reads every footer again and returns the sum. Raises StorageError if a chunk has no valid part."""
        present = self.names()
        infos = dict(self._read(sorted(present)))
        missing = [chunk.index for chunk in self.chunks if chunk.index not in infos]
        self.committed &= infos.keys()
        if missing:
            raise StorageError(
                f"{len(missing)} of {len(self.chunks)} parts are missing or damaged, the first is "
                f"{self._context.layout.part(missing[0])}. Run the same command again: their rows are computed again."
            )
        counts = RowCounts()
        for info in infos.values():
            counts.add(info.counts)
        return counts

    def _read(self, indices: Iterable[int]) -> list[tuple[int, PartInfo]]:
        """The valid ones among these parts. One that vanishes meanwhile is not there."""
        indices = list(indices)
        if len(indices) < 2 * _FOOTER_THREADS:
            results = [self._read_one(index) for index in indices]
        else:
            with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
                results = list(pool.map(self._read_one, indices))
        good: list[tuple[int, PartInfo]] = []
        for index, result in zip(indices, results, strict=True):
            if isinstance(result, BadPartError):
                result = self._quarantine(index, result)
            if result is not None:
                good.append((index, result))
        return good

    def _read_one(self, index: int) -> PartInfo | BadPartError | None:
        path = self._context.layout.part(index)
        try:
            with storage_errors("reading", path):
                try:
                    return reread(lambda: self._context.read_part(self._by_index[index]))
                except FileNotFoundError:
                    return None
        except BadPartError as error:
            return error

    def _quarantine(self, index: int, problem: BadPartError) -> PartInfo | None:
        """Moves a bad part away. Another process may have replaced it by a good one in between, so the moved file
        is checked again, and put back if it is good."""
        context = self._context
        path = context.layout.part(index)
        if not self._repair:
            self._warnings.append(f"{path} is damaged: {problem}. The next run moves it away and redoes its rows.")
            return None
        away = context.layout.quarantine / f"{path.name}.{context.attempt}"
        with storage_errors("moving to quarantine", path):
            try:
                context.fs.rename(path, away)
            except FileNotFoundError:
                return None
            try:
                info = context.read_part_at(away, self._by_index[index])
            except BadPartError:
                info = None
            if info is not None:
                context.publish(away, path)
                context.fs.unlink_if_there(away)
            context.fs.fsync_dir(context.layout.data)
            context.fs.fsync_dir(context.layout.quarantine)
        if info is None:
            self._warnings.append(f"{path} is damaged: {problem}. It was moved to {away}; its rows are computed again.")
        return info
