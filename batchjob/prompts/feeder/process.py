"""`Feeder`: the parent's side. Its child is `python -m batchjob.prompts.feeder`. A child that dies or hangs is
replaced, and the next one continues after the rows that have arrived. A full pipe and a short queue bound how far it
reads ahead.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from batchjob import child_process
from batchjob.errors import BatchJobError, FeederError
from batchjob.plan import Chunk
from batchjob.prompts.feeder.batches import FedBatch, FeederConfig
from batchjob.prompts.feeder.blame import Blame
from batchjob.prompts.feeder.frames import HEADER, Begun, Failure, Order, Packed, Ready

CHILD = (sys.executable, "-m", "batchjob.prompts.feeder")  # tests put a program of their own here
_READ_AHEAD = 8  # batches waiting in the parent
_TICK = 1.0  # seconds of silence counted at once: while this process is stopped, its child may be too
_MAX_PAUSE = 2.0  # seconds before a process is started again


class _Child:
    """One process."""

    def __init__(self, config: FeederConfig) -> None:
        self._process = child_process.spawn(
            CHILD, stdout=subprocess.PIPE, process_group=0, environ={"TRANSFORMERS_VERBOSITY": "error"}
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._fd = self._process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self.send(config)

    def send(self, message: object) -> None:
        child_process.send(self._process.stdin, message)  # if it is gone, the thread that reads from it says why

    def receive(self, seconds: float | None) -> object:
        """The next message; None once it is gone. Raises TimeoutError after so many seconds of silence."""
        header = self._read(HEADER.size, seconds)
        body = None if header is None else self._read(HEADER.unpack(header)[0], seconds)
        return None if body is None else pickle.loads(body)

    def _read(self, size: int, seconds: float | None) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            if seconds is not None:
                self._wait(seconds)
            block = os.read(self._fd, min(size - len(data), 1 << 20))
            if not block:
                return None
            data += block
        return bytes(data)

    def _wait(self, seconds: float) -> None:
        while not self._poll.poll(1000 * min(_TICK, seconds)):
            seconds -= _TICK
            if seconds <= 0:
                raise TimeoutError

    def end(self, patience: float = 0.0) -> int:
        """Ends it, at once or when it has had so many seconds to do so itself. Returns its return code."""
        assert self._process.stdin is not None
        if patience:
            self._process.stdin.close()
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@dataclass(slots=True)
class _Asked:
    """A chunk of which more is to come. `arrived` are the rows that have."""

    chunk: Chunk
    skip: array[int]
    arrived: array[int] = field(default_factory=lambda: array("q"))

    def order(self, blame: Blame) -> Order:
        rows = range(self.chunk.row_index, self.chunk.row_index + self.chunk.num_rows)
        return Order(
            self.chunk,
            (self.skip + self.arrived).tobytes(),
            array("q", [row for row in blame.alone if row in rows]).tobytes(),
            {row: why for row, why in blame.poisoned.items() if row in rows},
        )


class Feeder:
    """A PromptFeeder in a process of its own. It starts at once; loading happens beside the caller's own.

    `echo` gets a line for a person whenever the process has to be started again.
    """

    def __init__(self, config: FeederConfig, echo: Callable[[str], None] = lambda line: None) -> None:
        self._config = replace(config, plan=replace(config.plan, chunks=()))
        self._echo = echo
        self._queue: queue.Queue[Packed | Failure | str] = queue.Queue(_READ_AHEAD)
        self._failure: BatchJobError | None = None
        self._blame = Blame()
        self._asked: deque[_Asked] = deque()
        self._warned: set[str] = set()
        self._has_said_its_last = False
        self._closed = threading.Event()
        self._sending = threading.Lock()  # held while the child is written to or replaced
        try:
            self._child = _Child(self._config)
        except OSError as error:
            raise FeederError(f"the process that reads and tokenises the input cannot be started: {error}") from error
        self._thread = threading.Thread(target=self._read, name="feeder", daemon=True)
        self._thread.start()

    def feed(self, chunk: Chunk, skip_rows: Collection[int] = ()) -> None:
        with self._sending:
            asked = _Asked(chunk, array("q", sorted(skip_rows)))
            self._asked.append(asked)
            self._child.send(asked.order(self._blame))

    def poll(self, timeout: float = 0.0) -> list[FedBatch]:
        if self._failure is not None:
            raise self._failure
        batches: list[FedBatch] = []
        try:
            message = self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
            while self._failure is None:
                if isinstance(message, Packed):
                    batches.append(message.batch())
                    if len(batches) == _READ_AHEAD:  # a fast child refills the queue while it is emptied
                        break
                elif isinstance(message, Failure):
                    self._failure = message.error()
                else:
                    self._echo(message)
                message = self._queue.get_nowait()
        except queue.Empty:
            pass
        if self._failure is not None and not batches:
            raise self._failure
        return batches

    def close(self) -> None:
        """Ends the child; whatever it had read ahead is dropped. Safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._sending:  # no other child can come any more
            self._child.end(2.0)
        while self._thread.is_alive():  # it may wait for room in the queue
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)
        self._child.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    # -- the thread that listens to the child

    def _read(self) -> None:
        try:
            self._watch()
        except Exception as error:  # else `poll` would never learn that no more will come
            self._queue.put(Failure("FeederError", f"listening to the tokeniser failed: {error!r}"))

    def _watch(self) -> None:
        while not self._closed.is_set():
            came_down = self._listen()
            while came_down is not None and not self._closed.is_set():
                rows, how = came_down
                remedy = self._blame.accuse(rows, how)
                if self._blame.gave_up is not None:
                    where = f" while it read {self._place()}" if not rows and self._asked else ""
                    message = f"the process that reads and tokenises the input {how}{where}, {self._blame.gave_up}"
                    self._queue.put(Failure("FeederError", f"{message}; finished rows are safe"))
                    return
                self._queue.put(f"the process that reads and tokenises the input {how} and is started again; {remedy}")
                self._closed.wait(min(_MAX_PAUSE, self._blame.pause))
                came_down = self._start_again()
            if self._has_said_its_last:
                return

    def _listen(self) -> tuple[list[int], str] | None:
        """Until the child comes down: the rows that it was building, and how it did. None after its last word."""
        rows: list[int] = []
        seconds = self._config.load_seconds or None
        try:
            while (message := self._child.receive(seconds)) is not None:
                if isinstance(message, Begun):
                    rows, seconds = array("q", message.rows).tolist(), message.seconds
                elif isinstance(message, Ready):
                    seconds = None
                elif isinstance(message, Packed):
                    self._queue.put(self._arrived(message))
                    rows, seconds = [], None
                elif isinstance(message, Failure):
                    self._has_said_its_last = True
                    self._queue.put(message)
                    return None
        except TimeoutError:
            self._child.end()
            doing = "the rows that it tokenises" if rows else "loading its tokeniser"
            return rows, f"hung: {seconds:.0f} s without a word about {doing}"
        except OSError as error:
            self._child.end()
            return rows, f"cannot be heard: {error}"
        return rows, _ending(self._child.end(1.0))

    def _arrived(self, message: Packed) -> Packed:
        rows = array("q", message.rows)
        self._blame.built(rows)
        self._asked[0].arrived += rows
        if message.last:
            self._asked.popleft()
            if not self._warned.isdisjoint(message.warnings):  # a new process says them again
                message = replace(message, warnings=tuple(w for w in message.warnings if w not in self._warned))
            self._warned.update(message.warnings)
        return message

    def _start_again(self) -> tuple[list[int], str] | None:
        """Another child, which is told what is left of every chunk. If it cannot be started, what `_listen` returns."""
        with self._sending:
            if not self._closed.is_set():
                self._child.close()
                try:
                    self._child = _Child(self._config)
                except OSError as error:
                    return [], f"cannot be started ({error})"
                for asked in self._asked:
                    self._child.send(asked.order(self._blame))
        return None

    def _place(self) -> str:
        chunk = self._asked[0].chunk
        file = self._config.plan.files[chunk.segments[0].file_index]
        return f"{file.path} (rows {chunk.row_index} to {chunk.row_index + chunk.num_rows - 1})"


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
