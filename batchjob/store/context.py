"""`StoreContext`: the values that the modules of an open store share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from batchjob.errors import StorageError
from batchjob.plan import Chunk
from batchjob.store.attempts import is_alive, read_attempt
from batchjob.store.columns import OutputColumns
from batchjob.store.disk_errors import storage_errors
from batchjob.store.fsops import FsOps
from batchjob.store.manifest import Manifest
from batchjob.store.parts import PartInfo, check_expected, read_info
from batchjob.store.paths import Layout
from batchjob.store.publish import publish
from batchjob.store.reread import reread

# Finished rows of open chunks that are kept in memory; past it a row is an offset in its log.
DEFAULT_MEMORY_LIMIT = 32 * 2**20


@dataclass(slots=True)
class MemoryBudget:
    """Bytes of finished rows that all open chunks of a store hold, and may hold."""

    limit: int = DEFAULT_MEMORY_LIMIT
    used: int = 0

    def take(self, size: int) -> bool:
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        self.used -= size


@dataclass(frozen=True, slots=True)
class StoreContext:
    """The output, job and attempt of an open store. `patience` is how long it waits for a file that another process is
    known to have made: the caches of a network file system may hide it for a while."""

    fs: FsOps
    layout: Layout
    manifest: Manifest
    attempt: str
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    patience: float = 60.0  # seconds
    schema: pa.Schema = field(init=False)  # of every part
    columns: OutputColumns = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", self.manifest.arrow_schema)
        object.__setattr__(self, "columns", self.manifest.output_columns)

    def check_place(self) -> None:
        """Raises StorageError unless the path still leads to the job that was opened, by the id in its manifest.

        If the output was moved or deleted, another job may have begun under its name. Nothing of ours can get into that
        one (see `anchors`), but further writes would go to a place where no reader looks.
        """
        now = FsOps()  # looks where the path leads, not below what was opened
        with storage_errors("looking for", self.layout.manifest):
            there = Manifest.from_bytes(now.read_file(self.layout.manifest), source=str(self.layout.manifest))
        if there.job_id != self.manifest.job_id:
            raise StorageError(
                f"{self.layout.root} was replaced by the output of another job during the run. Nothing was written to "
                "it. If the old directory was moved, its finished rows are there: put it back and run the same command "
                "again."
            )

    def read_part(self, chunk: Chunk) -> PartInfo:
        """The footer of a chunk's part, checked. Raises BadPartError, or OSError (FileNotFoundError: there is none)."""
        return self.read_part_at(self.layout.part(chunk.index), chunk)

    def read_part_at(self, path: Path, chunk: Chunk) -> PartInfo:
        """The footer of a file that does not have its final name yet, checked. Raises BadPartError or OSError."""
        info = read_info(self.fs, path, self.schema)
        check_expected(info, job_id=self.manifest.job_id, fingerprint=self.manifest.fingerprint_digest, chunk=chunk)
        return info

    def read_winner(self, chunk: Chunk) -> PartInfo:
        """The footer of a part that is known to exist. Raises BadPartError or OSError."""
        deadline = time.monotonic() + self.patience
        delay = 0.05
        while True:
            try:
                return reread(lambda: self.read_part(chunk))
            except FileNotFoundError:
                if time.monotonic() + delay > deadline:
                    raise
            time.sleep(delay)
            delay = min(2 * delay, 5.0)

    def publish(self, tmp: Path, target: Path) -> bool:
        """Gives a finished file its final name; False if another process was first. Raises OSError, StorageError."""
        return publish(
            self.fs,
            self.manifest.link_method,
            tmp,
            target,
            claims=self.layout.claims,
            attempt=self.attempt,
            is_dead=self.is_dead,
            patience=self.patience,
        )

    def is_dead(self, attempt: str) -> bool:
        """True if an attempt is known to be over, or to be none of this job. False if that cannot be told from here."""
        record = read_attempt(self.fs, self.layout.attempt(attempt))
        if record is not None and record.get("job", self.manifest.job_id) != self.manifest.job_id:
            return True
        return is_alive(record) is False

    def remove_wal(self, chunk_index: int) -> None:
        """Removes a chunk's logs if that is possible: nothing needs them once the part is durable."""
        try:
            self.fs.remove_tree(self.layout.chunk_wal(chunk_index))
        except OSError:
            return  # the next start tries again
