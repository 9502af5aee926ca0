"""The tools of the store's tests: small jobs, a file system that fails, crashes and loses power, and the check that
every row is there exactly once. Also run as a program, for tests that kill processes (see `main`)."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchjob.plan import Chunk, InputFile, JobPlan, Segment
from batchjob.records import Completion, RowError
from batchjob.store import FsOps, Manifest, Store
from batchjob.store.parts import PartInfo, read_info, read_tables
from batchjob.store.paths import Layout

CARRIED = pa.schema([("question", pa.string()), ("extra", pa.string())])


def make_plan(
    num_rows: int, chunk_rows: int, schema: pa.Schema = CARRIED, kinds: dict[str, str] | None = None
) -> JobPlan:
    chunks = [
        Chunk(index, first, min(chunk_rows, num_rows - first), (Segment(0, first, min(chunk_rows, num_rows - first)),))
        for index, first in enumerate(range(0, num_rows, chunk_rows))
    ]
    file = InputFile("/data/rows.jsonl", "jsonl", "", 1234, 5678, num_rows, "digest")
    if kinds is None:
        kinds = {"question": "string", "extra": "json"} if schema is CARRIED else dict.fromkeys(schema.names, "parquet")
    return JobPlan((file,), tuple(chunks), kinds, schema.serialize().to_pybytes())


def make_manifest(plan: JobPlan, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "spec": {},
        "resolved": {},
        "fingerprint": {"model": "m", "sampling": {"temperature": 0.0}},
    }
    return Manifest.new(plan, **{**values, **changes})


def carried(chunk: Chunk) -> pa.Table:
    rows = range(chunk.row_index, chunk.row_index + chunk.num_rows)
    return pa.table(
        {"question": [f"q{row}" for row in rows], "extra": [f'{{"row": {row}}}' for row in rows]}, schema=CARRIED
    )


def completion(row: int, sample: int = 0) -> Completion:
    """The result of a row; some rows fail."""
    if row % 7 == 3:
        return Completion(row, sample, 5, [], None, None, RowError("prompt_too_long", f"row {row} is too long"))
    return Completion(row, sample, 3 + row, [row, sample, 9], f"answer {row}.{sample} \u2028 é", "stop")


def finish_chunk(store: Store, index: int) -> Any:
    """Adds the rows of a chunk that are missing and commits it."""
    chunk = store.open_chunk(index)
    for row in range(chunk.chunk.row_index, chunk.chunk.row_index + chunk.chunk.num_rows):
        for sample in range(store.manifest.num_samples):
            chunk.add(completion(row, sample))
    return chunk.commit(carried(chunk.chunk))


class Job:
    """A run over all chunks: what it computed, and what it had made durable, is there to see after it died."""

    def __init__(self) -> None:
        self.computed: list[tuple[int, int]] = []
        self.added: set[tuple[int, int]] = set()
        self.flushed: set[tuple[int, int]] = set()

    def run(
        self,
        output: Path,
        plan: JobPlan,
        *,
        fs: FsOps | None = None,
        num_samples: int = 1,
        seed: int = 0,
        pause: float = 0.0,
        **options: Any,
    ) -> Store:
        rng = random.Random(seed)
        manifest = make_manifest(plan, num_samples=num_samples)
        store = Store.create(output, manifest, plan, fs=fs or FastFs(), **options)
        assert store.manifest.diff(manifest) == []
        store.start_attempt({"test": True})
        if not plan.chunks:
            store.commit_empty()
        while todo := sorted({chunk.index for chunk in store.plan.chunks} - store.committed()):
            rng.shuffle(todo)
            chunks = [store.open_chunk(index) for index in todo[:2]]
            work = [
                (chunk, row, sample)
                for chunk in chunks
                for row in range(chunk.chunk.row_index, chunk.chunk.row_index + chunk.chunk.num_rows)
                for sample in range(num_samples)
                if (row, sample) not in chunk.finished
            ]
            rng.shuffle(work)
            for number, (chunk, row, sample) in enumerate(work):
                time.sleep(rng.random() * pause)
                self.computed.append((row, sample))
                chunk.add(completion(row, sample))
                self.added.add((row, sample))
                if number % 3 == 2:
                    store.flush()
                    self.flushed |= self.added
            for chunk in chunks:
                chunk.commit(carried(chunk.chunk))
                self.flushed |= {key for key in self.added if chunk.chunk.row_index <= key[0] < _stop(chunk.chunk)}
        store.finish()
        store.close()
        return store


def _stop(chunk: Chunk) -> int:
    return chunk.row_index + chunk.num_rows


def check_output(output: Path, plan: JobPlan, num_samples: int = 1) -> None:
    """Every row exactly once, in order, with its own columns; every part valid in itself; nothing else there."""
    layout = Layout(output)
    names = sorted(os.listdir(layout.data))
    assert names == [layout.part(chunk.index).name for chunk in plan.chunks or (Chunk(0, 0, 0, ()),)]
    rows = []
    for name in names:
        _, found = read_whole(layout.data / name, Store.open(output).manifest)
        rows += found
    assert rows == [expected_row(row, sample) for row in range(plan.num_rows) for sample in range(num_samples)]


def read_whole(path: Path, manifest: Manifest) -> tuple[PartInfo, list[dict[str, Any]]]:
    """A part with all its checks."""
    info = read_info(FsOps(), path, manifest.arrow_schema)
    return info, [row for table in read_tables(FsOps(), path, info) for row in table.to_pylist()]


def expected_row(row: int, sample: int) -> dict[str, Any]:
    c = completion(row, sample)
    return {
        "row_index": row,
        "sample_index": sample,
        "question": f"q{row}",
        "extra": f'{{"row": {row}}}',
        "status": "error" if c.error else "ok",
        "output": c.text,
        "finish_reason": c.finish_reason,
        "num_prompt_tokens": c.num_prompt_tokens,
        "num_output_tokens": len(c.token_ids),
        "error_type": c.error.type if c.error else None,
        "error_message": c.error.message if c.error else None,
    }


def read_data(output: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in sorted(os.listdir(output / "data")):
        rows += pq.read_table(output / "data" / name).to_pylist()
    return rows


class FastFs(FsOps):
    """Without the fsyncs, which mean nothing where no power is lost and take most of the time of a small job."""

    def fsync(self, fd: int) -> None:
        os.fstat(fd)

    def fdatasync(self, fd: int) -> None:
        os.fstat(fd)

    def fsync_dir(self, path: Path) -> None:
        os.stat(path)


class Crash(BaseException):
    """The process is gone: no handler for errors sees it, and no file operation works after it."""


OPERATIONS = (
    "create",
    "write",
    "fsync",
    "fdatasync",
    "close",
    "link",
    "rename",
    "rename_noreplace",
    "unlink",
    "mkdir",
    "rmdir",
    "fsync_dir",
    "listdir",
    "stat",
    "access",
    "open_read",
)


class FaultyFs(FastFs):
    """Crashes or fails at the k-th operation (from 0). A write that crashes has done half of its work.

    `error` is an errno to raise instead of crashing, once or (`persistent`) from then on. `only` limits what counts.
    `before` is called with name and arguments ahead of each operation, and may raise or act.
    """

    def __init__(
        self,
        at: int | None = None,
        *,
        error: int | None = None,
        persistent: bool = False,
        only: Iterable[str] = OPERATIONS,
        before: Callable[..., None] | None = None,
    ) -> None:
        self.at = at
        self.error = error
        self.persistent = persistent
        self.only = set(only)
        self.before = before
        self.count = 0
        self.crashed = False
        self.log: list[tuple[str, Any]] = []
        self._fds: set[int] = set()

    def _do(self, name: str, *args: Any) -> Any:
        if self.crashed:
            raise Crash
        if self.before is not None:
            self.before(name, *args)
        self.log.append((name, args[0]))
        if name in self.only:
            number = self.count
            self.count += 1
            if self.at is not None and (number == self.at or (self.persistent and number > self.at)):
                self._fault(name, args)
        return self.real(name, *args)

    def real(self, name: str, *args: Any) -> Any:
        result = getattr(FastFs, name)(self, *args)
        if name == "create":
            self._fds.add(result)
        elif name == "close":
            self._fds.discard(args[0])
        return result

    def _fault(self, name: str, args: tuple[Any, ...]) -> None:
        if self.error is not None:
            if name == "close":
                self.real(name, *args)
            raise OSError(self.error, os.strerror(self.error), str(args[0]))
        if name == "write":
            self.real(name, args[0], bytes(args[1])[: len(args[1]) // 2])
        self.crashed = True
        raise Crash

    def release(self) -> None:
        """Closes what the dead process had open."""
        for fd in self._fds:
            os.close(fd)
        self._fds = set()

    def create(self, path: Path) -> int:
        return self._do("create", path)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return self._do("write", fd, data)

    def fsync(self, fd: int) -> None:
        self._do("fsync", fd)

    def fdatasync(self, fd: int) -> None:
        self._do("fdatasync", fd)

    def close(self, fd: int) -> None:
        self._do("close", fd)

    def link(self, source: Path, target: Path) -> None:
        self._do("link", source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", source, target)

    def rename_noreplace(self, source: Path, target: Path) -> None:
        self._do("rename_noreplace", source, target)

    def unlink(self, path: Path) -> None:
        self._do("unlink", path)

    def mkdir(self, path: Path) -> None:
        self._do("mkdir", path)

    def rmdir(self, path: Path) -> None:
        self._do("rmdir", path)

    def fsync_dir(self, path: Path) -> None:
        self._do("fsync_dir", path)

    def listdir(self, path: Path) -> list[str]:
        return self._do("listdir", path)

    def stat(self, path: Path) -> os.stat_result:
        return self._do("stat", path)

    def access(self, path: Path) -> bool:
        return self._do("access", path)

    def open_read(self, path: Path) -> BinaryIO:
        return self._do("open_read", path)


class PowerFs(FaultyFs):
    """Crashes like FaultyFs; `lose_power` then brings the directory into a state that a power loss may leave.

    Data that was not fsynced is gone (truncated or zeroed), and so are names whose directory was not fsynced. Names
    that were removed, without an fsync of their directory, are back or stay away.
    """

    def __init__(self, at: int, graveyard: Path) -> None:
        super().__init__(at)
        self._graveyard = graveyard
        graveyard.mkdir(parents=True, exist_ok=True)
        self._paths: dict[int, Path] = {}  # of open descriptors
        self._synced: dict[int, int] = {}  # bytes on disk, by inode
        self._inodes: dict[int, Path] = {}  # a second name that no unlink reaches, by inode
        # What no fsync has made durable yet: (directory, kind, undo), in order.
        self._pending: list[tuple[Path, str, Callable[[], None]]] = []

    def _bury(self, path: Path) -> Path:
        grave = self._graveyard / f"{len(os.listdir(self._graveyard))}-{path.name}"
        os.link(path, grave)
        return grave

    def real(self, name: str, *args: Any) -> Any:
        undo = self._undo(name, args)
        result = super().real(name, *args)
        if name == "create":
            self._paths[result] = args[0]
            inode = os.fstat(result).st_ino
            self._synced[inode] = 0
            self._inodes[inode] = self._bury(args[0])
        elif name in ("fsync", "fdatasync"):
            status = os.fstat(args[0])
            self._synced[status.st_ino] = status.st_size
        elif name == "fsync_dir":
            self._pending = [item for item in self._pending if item[0] != args[0]]
        if undo is not None:
            self._pending.append(undo)
        return result

    def _undo(self, name: str, args: tuple[Any, ...]) -> tuple[Path, str, Callable[[], None]] | None:
        path: Path = args[0]
        if name == "create":
            return path.parent, "add", lambda: path.unlink(missing_ok=True)
        if name == "mkdir":
            return path.parent, "add", lambda: shutil.rmtree(path, ignore_errors=True)
        if name == "link":
            target: Path = args[1]
            return target.parent, "add", lambda: target.unlink(missing_ok=True)
        if name in ("rename", "rename_noreplace"):
            return args[1].parent, "add", self._undo_rename(path, args[1])
        if name == "unlink" and path.exists():
            grave = self._bury(path)
            return path.parent, "remove", lambda: _restore(grave, path)
        if name == "rmdir" and path.exists():
            return path.parent, "remove", lambda: path.mkdir(exist_ok=True) if path.parent.exists() else None
        return None

    def _undo_rename(self, source: Path, target: Path) -> Callable[[], None]:
        replaced = self._bury(target) if target.is_file() else None

        def undo() -> None:
            if target.exists() and source.parent.exists():
                os.rename(target, source)
            if replaced is not None:
                _restore(replaced, target)

        return undo

    def lose_power(self, *, names: str, data: str) -> None:
        """`names`: "kept", "lost" (both ways), or "added-lost" (removals reached the disk, additions did not).
        `data`: what is left of unsynced bytes, "cut" or "zeroed"."""
        for _, kind, undo in reversed(self._pending):
            if names == "lost" or (names == "added-lost" and kind == "add"):
                undo()
        for inode, path in self._inodes.items():
            size, synced = path.stat().st_size, self._synced[inode]
            if synced < size:
                os.truncate(path, synced)
                if data == "zeroed":
                    os.truncate(path, size)


def _restore(grave: Path, path: Path) -> None:
    if path.parent.exists() and not path.exists():
        os.link(grave, path)


def no_space(name: str, *args: Any) -> None:
    """A `before` for FaultyFs: the disk is full for everything but logs and small files that are there."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))


def main(argv: list[str]) -> None:
    """OUTPUT SEED WORKERS SECONDS ROWS: that many processes work on one output, all on all chunks; one at random is
    killed and started again, for some seconds. Then they are left in peace. Prints the number of kills."""
    output, seed, num_workers, seconds = Path(argv[0]), int(argv[1]), int(argv[2]), float(argv[3])
    plan = make_plan(int(argv[4]), 8)
    carried(plan.chunks[0])  # the first array is slow to make: done here, before the processes part
    rng = random.Random(seed)
    workers: list[int] = []
    num_kills = num_starts = 0

    def start() -> int:
        nonlocal num_starts
        num_starts += 1
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            Job().run(output, plan, seed=seed * 1000 + num_starts, pause=0.01)
            status = 0
        finally:
            os._exit(status)

    workers = [start() for _ in range(num_workers)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(rng.random() * 0.12)
        victim = rng.randrange(num_workers)
        os.kill(workers[victim], signal.SIGKILL)
        _, status = os.waitpid(workers[victim], 0)
        num_kills += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a worker failed"
        workers[victim] = start()
    statuses = [os.waitpid(pid, 0)[1] for pid in workers]
    assert statuses == [0] * num_workers, f"workers failed: {statuses}"
    print(num_kills)


if __name__ == "__main__":
    main(sys.argv[1:])
