"""`Store`: an output directory, open for work. It promises:

* a finished row that `OpenChunk.add` took survives a kill at once, and a power loss after the next `flush`;
* each input row ends up in exactly one part, whatever crashes, and however many processes share the output;
* everything in OUT/data is complete, checksummed and never changed.

The directory is the truth: a chunk is committed if its part is there. No lock, clock or count decides anything.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchjob.plan import JobPlan
from batchjob.store.attempts import AttemptFile, new_attempt_id
from batchjob.store.catalog import Catalog
from batchjob.store.chunk import OpenChunk
from batchjob.store.claims import ChunkClaims
from batchjob.store.commit import Committed, commit_chunk
from batchjob.store.context import DEFAULT_MEMORY_LIMIT, MemoryBudget, StoreContext
from batchjob.store.counts import RowCounts
from batchjob.store.creation import (
    anchor_output,
    create_output,
    exists,
    load_output,
    refuse_foreign_state,
    refuse_two_file_systems,
    restore_directories,
    sweep_unfinished,
)
from batchjob.store.disk_errors import create_errors, storage_error, storage_errors
from batchjob.store.fsops import FsOps
from batchjob.store.lease import Lease
from batchjob.store.manifest import Manifest
from batchjob.store.paths import Layout
from batchjob.store.plan_files import publish_extension
from batchjob.store.sweep import sweep


class Store:
    """An open output directory; the module says what it promises. Not thread-safe; each process opens its own.

    `warnings` are lines for a person: damaged parts, foreign files, damaged log records.
    """

    def __init__(
        self,
        output: Path,
        manifest: Manifest,
        plan: JobPlan,
        *,
        attempt: str,
        fs: FsOps,
        memory_limit: int = DEFAULT_MEMORY_LIMIT,
    ) -> None:
        self.output = output
        self.manifest = manifest
        self.plan = plan
        self.attempt = attempt
        self.warnings: list[str] = []
        self._fs = fs
        self._layout = Layout(output)
        self._context = StoreContext(fs, self._layout, manifest, attempt, MemoryBudget(memory_limit))
        self._catalog = Catalog(self._context, plan, self.warnings)
        self._open: list[OpenChunk] = []
        self._started = False
        self._attempt_file = AttemptFile(fs, self._layout, attempt, manifest.job_id)

    # -- opening

    @classmethod
    def create(
        cls,
        output: str | Path,
        manifest: Manifest,
        plan: JobPlan,
        *,
        fs: FsOps | None = None,
        memory_limit: int = DEFAULT_MEMORY_LIMIT,
    ) -> Store:
        """Makes the output directory, or opens the one that is there: `manifest` and `plan` of the result are those of
        the process that was first, so check `store.manifest.diff(manifest)`.

        Raises OutputCreateError (or StorageError on a full disk).
        """
        fs, output, attempt = fs or FsOps(), Path(output).absolute(), new_attempt_id()
        create_output(fs, output, manifest, plan, attempt)
        anchor_output(fs, output)
        refuse_foreign_state(fs, output)
        return cls(output, *load_output(fs, output), attempt=attempt, fs=fs, memory_limit=memory_limit)

    @classmethod
    def open(cls, output: str | Path, *, fs: FsOps | None = None, memory_limit: int = DEFAULT_MEMORY_LIMIT) -> Store:
        """Opens an output directory without writing anything. Raises UsageError if it is none, StorageError if it is
        damaged, ConfigMismatchError if a newer version wrote it."""
        fs, output = fs or FsOps(), Path(output).absolute()
        anchor_output(fs, output)
        refuse_foreign_state(fs, output)
        return cls(output, *load_output(fs, output), attempt=new_attempt_id(), fs=fs, memory_limit=memory_limit)

    @staticmethod
    def exists(output: str | Path, *, fs: FsOps | None = None) -> bool:
        """True if a directory holds a job. Raises StorageError."""
        path = Path(output).absolute()
        with storage_errors("looking for", path):
            return exists(fs or FsOps(), path)

    def start_attempt(self, info: Mapping[str, Any]) -> None:
        """Writes the file of this attempt, proves that the output can be written to, and removes the files that dead
        attempts left: temporary ones, and the logs of committed chunks. Before the first `open_chunk`.

        `info` is free: scheduler ids, versions, settings that may change between runs. Raises OutputCreateError if the
        output cannot be written to, StorageError.
        """
        self._context.check_place()
        with create_errors(self.output):
            restore_directories(self._fs, self._layout)
            if not self._fs.access(self._layout.data):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self._layout.data))
            self._attempt_file.write(info)
            refuse_two_file_systems(self._fs, self._layout, self.attempt)
        self._started = True
        with storage_errors("cleaning up", self._layout.state):
            sweep_unfinished(self._fs, self.output)
            sweep(self._context, self.committed())

    def note_attempt(self, info: Mapping[str, Any]) -> None:
        """Adds to the file of this attempt: a heartbeat counter, the reason of the end. From any thread.

        Raises StorageError.
        """
        self._attempt_file.note(info)

    def chunk_claims(self, keeps: Callable[[Mapping[str, Any] | None], bool] = lambda record: False) -> ChunkClaims:
        """The claims of this attempt. After `start_attempt`. `keeps`: see `ChunkClaims`."""
        return ChunkClaims(self._context, self._attempt_file.info, keeps)

    def is_published(self, index: int) -> bool:
        """True if a chunk has a part by name. Raises StorageError."""
        path = self._layout.part(index)
        with storage_errors("looking for", path):
            return self._fs.exists(path)

    def published(self) -> set[int]:
        """The chunks that have a part by name alone. Raises StorageError."""
        return set(self._catalog.names())

    def lease(self, shard: tuple[int, int]) -> Lease:
        """The lease of a shard, given as its number and the number of shards. Not acquired yet."""
        return Lease(self._context, self._attempt_file, shard)

    def extend(self, extension: JobPlan) -> bool:
        """Adds new input files to the job: their chunks follow those of `plan`, which holds them afterwards.

        False if another process has extended the job meanwhile; `plan` then holds its files. Before the first
        `open_chunk`. Raises StorageError.
        """
        if not self._started:
            with create_errors(self.output):
                restore_directories(self._fs, self._layout)
            self.note_attempt({})
        won = publish_extension(self._context, self.plan, extension)
        _, self.plan = load_output(self._fs, self.output)
        self._catalog = Catalog(self._context, self.plan, self.warnings)
        return won

    # -- what is there

    def committed(self) -> set[int]:
        """The chunks that have a valid part, those of other processes included. Only parts not seen before are read
        (their footers). A bad one is moved to quarantine, with a warning, and its chunk is open again.

        Raises StorageError.
        """
        return self._catalog.scan()

    def counts(self) -> RowCounts:
        """Output rows that are finished: in the parts seen so far and in the chunks open here."""
        counts = self.committed_counts()
        counts.add(self.open_counts())
        return counts

    def committed_counts(self) -> RowCounts:
        """Output rows in the parts seen so far."""
        counts = RowCounts()
        counts.add(self._catalog.totals)
        return counts

    def open_counts(self) -> RowCounts:
        """Finished output rows in the chunks open here."""
        counts = RowCounts()
        for chunk in self._open:
            if not chunk.closed:
                counts.add(chunk.counts)
        return counts

    def done(self) -> Mapping[str, Any] | None:
        """The content of done.json, if `finish` wrote it and every part is still there by name; else None. Reads no
        part."""
        try:
            data = self._fs.read_file(self._layout.done)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, "reading", self._layout.done) from error
        try:
            done = json.loads(data)
        except (ValueError, RecursionError):
            return None
        mine = isinstance(done, dict) and done.get("job_id") == self.manifest.job_id
        num_parts = len(self._catalog.chunks)
        whole = mine and done.get("num_parts") == num_parts  # else the job has been extended since
        return done if whole and len(self._catalog.names()) == num_parts else None

    # -- work

    def open_chunk(self, index: int) -> OpenChunk:
        """Opens a chunk for work; its finished rows are those of all its logs, also of other processes.

        Raises StorageError.
        """
        if not self._started:
            raise ValueError("start_attempt comes before open_chunk")
        with storage_errors("reading", self._layout.chunk_wal(index)):
            chunk = OpenChunk(self._context, self._catalog.chunk(index), on_commit=self._on_commit)
        if chunk.num_foreign:
            self.warnings.append(f"{chunk.num_foreign} logs of chunk {index} are of another job and were passed over.")
        if chunk.num_bad:
            self.warnings.append(
                f"{chunk.num_bad} damaged records in the logs of chunk {index} were passed over; their rows are "
                "computed again."
            )
        self._open = [other for other in self._open if not other.closed]
        self._open.append(chunk)
        return chunk

    def commit_empty(self) -> Committed:
        """Publishes the one empty part of a plan without rows, which carries the schema."""
        if self.plan.chunks:
            raise ValueError("the plan has rows")
        chunk = self._catalog.chunks[0]
        if chunk.index in self.committed():
            return Committed(chunk.index, 0, RowCounts(), won=False)
        with storage_errors("committing to", self._layout.data):
            try:
                committed = commit_chunk(self._context, chunk, lambda: (), None)
            except FileNotFoundError:  # the process that finished the job has removed our temporary file
                if chunk.index not in self.committed():
                    raise
                return Committed(chunk.index, 0, RowCounts(), won=False)
        self._on_commit(committed)
        return committed

    def _on_commit(self, committed: Committed) -> None:
        self._catalog.note(committed.chunk_index, committed.counts)

    def flush(self) -> None:
        """Makes every finished row durable, against power loss too. Raises StorageError."""
        for chunk in self._open:
            if not chunk.closed:
                chunk.sync()

    def finish(self) -> Mapping[str, Any]:
        """Checks all parts again, once every chunk is committed, and writes done.json, whose content it returns.

        Raises StorageError if a part is missing or damaged: the job is not complete then.
        """
        counts = self._catalog.verify()
        done = {
            "job_id": self.manifest.job_id,
            "fingerprint": self.manifest.fingerprint_digest,
            "num_parts": len(self._catalog.chunks),
            "num_rows": self.plan.num_rows,  # of the input
            "counts": counts.to_json(),  # of the output
        }
        with storage_errors("writing", self._layout.done):
            restore_directories(self._fs, self._layout)  # of a job that had nothing left to start
            self._fs.fsync_dir(self._layout.data)
            data = json.dumps(done, indent=1).encode() + b"\n"
            self._fs.replace_file(self._layout.done, data, via=self._layout.tmp / f"done.{self.attempt}")
            sweep(self._context, self._catalog.committed, is_finished=True)
        return done

    def close(self) -> None:
        """Flushes and closes the open chunks; their logs stay. Raises StorageError."""
        try:
            self.flush()
        finally:
            for chunk in self._open:
                if not chunk.closed:
                    chunk.close()
            self._open = []
            self._attempt_file.close()
            self._fs.release_anchors()
