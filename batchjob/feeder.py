"""Rows to prompts beside the engine: a process without torch that reads, renders and tokenises.

The parent keeps a `Feeder`; the child is `python -m batchjob.feeder`. Commands go to the child's standard input,
batches come back on its standard output, each a length and a pickle of plain values. The child stops when its input
ends, so it never outlives its parent. A full pipe and a short queue bound how far it reads ahead.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO, Any, Protocol

from batchjob import errors
from batchjob.errors import BatchJobError, EngineError
from batchjob.plan import Chunk, Plan
from batchjob.prompts import PromptBuilder, PromptConfig
from batchjob.records import Prompt, Record, RowError

BATCH_ROWS = 256
_BATCH_WEIGHT = 1 << 20  # characters or so of prompt text in one batch
_READ_AHEAD = 8  # batches waiting in the parent
_HEADER = struct.Struct("<Q")
_BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


@dataclass(frozen=True, slots=True)
class FeederConfig:
    """`tokenizer`: a local directory, or "fake"."""

    plan: Plan
    prompt: PromptConfig
    tokenizer: str
    max_row_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class FedBatch:
    """Some prompts of one chunk, in row order. `last` marks the end of the chunk, with or without prompts.

    `warnings` are about the input files.
    """

    chunk_index: int
    prompts: list[Prompt]
    last: bool
    warnings: tuple[str, ...] = ()


class PromptFeeder(Protocol):
    """The seam between the job and whoever makes prompts."""

    def feed(self, chunk: Chunk, skip_rows: Collection[int] = ()) -> None:
        """Queues a chunk; rows whose global ordinal is in `skip_rows` are left out. Chunks come back in this order."""
        ...

    def poll(self, timeout: float = 0.0) -> list[FedBatch]:
        """What is ready; waits up to `timeout` seconds for something. Raises what went wrong with the input."""
        ...

    def close(self) -> None: ...


class _Source:
    """Chunk to batches: the work itself, in whichever process."""

    def __init__(self, config: FeederConfig) -> None:
        from batchjob.io.reader import InputReader
        from batchjob.tokenizer import load_tokenizer

        self._reader = InputReader(config.plan, max_row_bytes=config.max_row_bytes)
        self._columns = config.prompt.source.read
        self._builder = PromptBuilder(config.prompt, load_tokenizer(config.tokenizer))

    def batches(self, chunk: Chunk, skip_rows: Collection[int]) -> Iterator[FedBatch]:
        for records in in_batches(self._reader.rows(chunk, self._columns, skip=skip_rows)):
            yield FedBatch(chunk.index, self._builder.build_many(records), False)
        warnings = tuple(self._reader.warnings)
        self._reader.warnings.clear()
        yield FedBatch(chunk.index, [], True, warnings)

    def close(self) -> None:
        self._reader.close()


def in_batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """At most 256 rows or about a million characters at a time, but always at least one row."""
    batch: list[Record] = []
    weight = 0
    for record in records:
        batch.append(record)
        weight += _weight(record)
        if len(batch) >= BATCH_ROWS or weight >= _BATCH_WEIGHT:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _weight(record: Record) -> int:
    """About the characters of a row's fields."""
    total = 0
    for value in record.fields.values():
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, list):
            total += 4 * len(value)
            total += sum(len(str(item.get("content"))) for item in value if isinstance(item, dict))
    return total


class InlineFeeder:
    """A PromptFeeder in this process and thread, for tests, `validate` and small jobs."""

    def __init__(self, config: FeederConfig) -> None:
        self._source = _Source(config)
        self._queue: deque[Iterator[FedBatch]] = deque()
        self._failure: BatchJobError | None = None

    def feed(self, chunk: Chunk, skip_rows: Collection[int] = ()) -> None:
        self._queue.append(self._source.batches(chunk, frozenset(skip_rows)))

    def poll(self, timeout: float = 0.0) -> list[FedBatch]:
        if self._failure is not None:
            raise self._failure
        if not self._queue:
            return []
        try:
            batch = next(self._queue[0])
        except BatchJobError as error:
            self._failure = error
            raise
        if batch.last:
            self._queue.popleft()
        return [batch]

    def close(self) -> None:
        self._queue.clear()
        self._source.close()


class Feeder:
    """A PromptFeeder in a process of its own. It starts at once; loading happens beside the caller's own."""

    def __init__(self, config: FeederConfig) -> None:
        # Signals of the job are the parent's to act on: blocked here, they stay blocked in the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "batchjob.feeder"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
                env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._frames: queue.Queue[bytes | None] = queue.Queue(_READ_AHEAD)
        self._failure: BatchJobError | None = None
        self._closed = False
        self._send(replace(config, plan=replace(config.plan, chunks=())))
        self._thread = threading.Thread(target=self._read, name="feeder", daemon=True)
        self._thread.start()

    def feed(self, chunk: Chunk, skip_rows: Collection[int] = ()) -> None:
        self._send((chunk, array("q", sorted(skip_rows)).tobytes()))

    def poll(self, timeout: float = 0.0) -> list[FedBatch]:
        if self._failure is not None:
            raise self._failure
        batches: list[FedBatch] = []
        try:
            frame = self._frames.get(timeout=timeout) if timeout > 0 else self._frames.get_nowait()
            while self._failure is None:
                message = _Failure.of(self._died()) if frame is None else pickle.loads(frame)
                if isinstance(message, _Packed):
                    batches.append(message.batch())
                    if len(batches) == _READ_AHEAD:  # a fast child refills the queue while it is emptied
                        break
                    frame = self._frames.get_nowait()
                else:
                    self._failure = message.error()
        except queue.Empty:
            pass
        if self._failure is not None and not batches:
            raise self._failure
        return batches

    def close(self) -> None:
        """Ends the child; whatever it had read ahead is dropped. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it is gone already
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while self._thread.is_alive():  # it may wait for room in the queue
            try:
                self._frames.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            _write_frame(self._process.stdin, pickle.dumps(message, 5))
        except OSError:
            pass  # the child is gone; poll() says why

    def _read(self) -> None:
        assert self._process.stdout is not None
        while not self._closed:
            frame = _read_frame(self._process.stdout)
            self._frames.put(frame)
            if frame is None:
                return

    def _died(self) -> BatchJobError:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = " (out of memory?)" if code == -9 else ""
        return EngineError(f"the process that reads and tokenises the input {how}{hint}; run the command again")


# -- what travels through the pipe


@dataclass(frozen=True, slots=True)
class _Packed:
    """A FedBatch in few objects: token ids as one array of int32."""

    chunk_index: int
    last: bool
    warnings: tuple[str, ...]
    rows: bytes
    lengths: bytes
    tokens: bytes
    params: dict[int, Any]
    errors: dict[int, tuple[str, str]]

    @classmethod
    def of(cls, batch: FedBatch) -> _Packed:
        tokens = array("i")
        for prompt in batch.prompts:
            tokens.extend(prompt.token_ids)
        return cls(
            batch.chunk_index,
            batch.last,
            batch.warnings,
            array("q", [prompt.row_index for prompt in batch.prompts]).tobytes(),
            array("q", [len(prompt.token_ids) for prompt in batch.prompts]).tobytes(),
            tokens.tobytes(),
            {i: prompt.params for i, prompt in enumerate(batch.prompts) if prompt.params is not None},
            {i: (p.error.type, p.error.message) for i, p in enumerate(batch.prompts) if p.error is not None},
        )

    def batch(self) -> FedBatch:
        tokens = array("i", self.tokens).tolist()
        prompts: list[Prompt] = []
        start = 0
        params, failed = self.params, self.errors
        for i, (row, length) in enumerate(zip(array("q", self.rows), array("q", self.lengths), strict=True)):
            stop = start + length
            error = RowError(*failed[i]) if i in failed else None
            prompts.append(Prompt(row, tokens[start:stop], params.get(i), error))
            start = stop
        return FedBatch(self.chunk_index, prompts, self.last, self.warnings)


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: str
    message: str

    @classmethod
    def of(cls, error: BatchJobError) -> _Failure:
        return cls(type(error).__name__, str(error))

    def error(self) -> BatchJobError:
        kind: type[BatchJobError] = getattr(errors, self.kind, EngineError)
        return kind(self.message)


def _write_frame(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_HEADER.pack(len(data)) + data if len(data) < 1 << 16 else _HEADER.pack(len(data)))
    if len(data) >= 1 << 16:
        pipe.write(data)
    pipe.flush()


def _read_frame(pipe: IO[bytes]) -> bytes | None:
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    data = pipe.read(size)
    return data if len(data) == size else None


# -- the child


def main() -> None:
    """The child process: a FeederConfig, then chunks, from standard input; frames to standard output."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # Transformers then starts faster and smaller
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whoever prints must not spoil the frames
    commands: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, commands), daemon=True).start()
    try:
        source = _Source(commands.get())
        while True:
            chunk, skip = commands.get()
            for batch in source.batches(chunk, frozenset(array("q", skip))):
                _write_frame(out, pickle.dumps(_Packed.of(batch), 5))
    except BrokenPipeError:
        os._exit(0)
    except BatchJobError as error:
        _report(out, _Failure.of(error))
    except Exception as error:
        import traceback

        traceback.print_exc()
        _report(out, _Failure("EngineError", f"reading and tokenising the input failed: {error!r}"))


def _listen(pipe: IO[bytes], commands: queue.Queue[Any]) -> None:
    while (frame := _read_frame(pipe)) is not None:
        commands.put(pickle.loads(frame))
    os._exit(0)  # the parent has closed the pipe, or is dead


def _report(out: IO[bytes], failure: _Failure) -> None:
    try:
        _write_frame(out, pickle.dumps(failure, 5))
    except OSError:
        os._exit(0)
    threading.Event().wait()  # until the parent closes the pipe


if __name__ == "__main__":
    # Under -m this file is __main__; the classes in the pickles are those of batchjob.feeder.
    from batchjob.feeder import main as _main

    _main()
