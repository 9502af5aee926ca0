"""`ParallelRunner`: a runner whose model is split over several processes, of which this one is the first.

The others (`follower`) are started here, get the inputs of every step through a pipe, and run it at the same
time on their own share of the weights and of the KV cache. The inputs are integers that the host has worked out once,
and tokens are drawn here alone, so no rank can make a different step. One that ends, for whatever reason, ends the
runner.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from batchjob import child_process
from batchjob.core.step_plan import StepPlan
from batchjob.engine.config import Capacity, EngineConfig, StepOutput
from batchjob.engine.model.checkpoint import load_config
from batchjob.engine.parallel.group import Group, abort, check_plan
from batchjob.engine.runner import TokenHandle, TorchRunner
from batchjob.engine.steps.inputs import StepInputs
from batchjob.errors import BatchJobError, EngineError, UnsupportedModelError

FOLLOWER = (sys.executable, "-m", "batchjob.engine.parallel.follower")
_REPORT_TIMEOUT = 2.0  # seconds to wait for the report of a follower whose end made a step fail here
_EXIT_TIMEOUT = 5.0  # seconds for a follower to end by itself
_POLL = 50e-6  # seconds between two looks at a step on a GPU


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a follower; then come `StepInputs`, and None at the end."""

    rank: int
    source: str
    config: EngineConfig
    meeting: Path
    parent_pid: int


@dataclass(frozen=True, slots=True)
class Report:
    """From a follower: it is there (no message), or why it ends."""

    message: str | None = None
    is_unsupported: bool = False


class Followers:
    """The processes of ranks 1 and up, each watched by a thread."""

    def __init__(self, source: str, config: EngineConfig, base: torch.device, meeting: Path) -> None:
        self._size = config.tensor_parallel
        self._meeting = meeting
        self._is_gpu = base.type == "cuda"
        self._is_closing = False
        self._lock = threading.Lock()
        self._ready = threading.Semaphore(0)
        self._failed = threading.Event()
        self._failure: EngineError = EngineError("")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        environ = {"OMP_NUM_THREADS": str(config.num_threads or 1)}
        for rank in range(1, self._size):
            device = f"cuda:{(base.index or 0) + rank}" if self._is_gpu else "cpu"
            setup = Setup(rank, source, replace(config, device=device), meeting, os.getpid())
            self._start(rank, setup, environ)

    def _start(self, rank: int, setup: Setup, environ: dict[str, str]) -> None:
        process = child_process.spawn(FOLLOWER, stdout=subprocess.PIPE, environ=environ)
        self._processes.append(process)
        thread = threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True)
        self._threads.append(thread)
        thread.start()
        child_process.send(process.stdin, setup)  # if it is gone, its thread sees that, here and below

    def wait_until_ready(self) -> None:
        """Returns when every follower is about to join the group. Raises EngineError."""
        for _ in self._processes:
            self._ready.acquire()
        self.check()

    def send(self, inputs: StepInputs) -> None:
        self.check()
        data = pickle.dumps(inputs, pickle.HIGHEST_PROTOCOL)
        for process in self._processes:
            child_process.write(process.stdin, data)

    def check(self) -> None:
        """Raises the EngineError of a follower that has ended."""
        if self._failed.is_set():
            raise self._failure

    def explain(self, error: Exception) -> Exception:
        """Returns the error of the follower that made a step or a load fail here, if one did: a group that breaks says
        little."""
        if self._failed.wait(_REPORT_TIMEOUT) and not (
            isinstance(error, BatchJobError) and str(error) in str(self._failure)
        ):
            return self._failure
        return error

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        for process in self._processes:
            child_process.send(process.stdin, None)
            _pipe(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(0 if self._failed.is_set() else _EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        message, is_unsupported = None, False
        with contextlib.suppress(EOFError):
            while True:
                report: Report = child_process.receive(process.stdout)
                if report.message is None:
                    self._ready.release()
                else:
                    message, is_unsupported = report.message, report.is_unsupported
        code = process.wait()
        _pipe(process.stdout).close()
        if not self._is_closing:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            text = f"process {rank + 1} of {self._size} that the model is split over: {message or f'ended by {how}'}"
            self._fail(UnsupportedModelError(text) if is_unsupported else EngineError(text))
        self._ready.release()

    def _fail(self, failure: EngineError) -> None:
        with self._lock:
            if self._failed.is_set():
                return
            self._failure = failure
            self._failed.set()
        # A rank that waits for the missing one to join would do so for long; where its file is a directory it fails.
        with contextlib.suppress(OSError):
            self._meeting.unlink(missing_ok=True)
            self._meeting.mkdir()
        if self._is_gpu:
            abort()


class ParallelHandle:
    """A plan that has been started on all ranks."""

    def __init__(self, handle: TokenHandle, followers: Followers) -> None:
        self._handle = handle
        self._followers = followers

    def result(self) -> StepOutput:
        # NCCL waits for a rank that is gone; so the device is not waited for, but looked at.
        while not self._handle.is_ready():
            self._followers.check()
            time.sleep(_POLL)
        output = self._handle.result()
        self._followers.check()
        return output


class ParallelRunner:
    """Implements `Runner` over `config.tensor_parallel` processes: GPUs in a row from `config.device` on, or the CPU.

    One at a time in a process: `torch.distributed` has one default group.
    """

    def __init__(self, source: str | Path, config: EngineConfig) -> None:
        """`source` is a directory with a checkpoint. Raises UnsupportedModelError or EngineError."""
        size = config.tensor_parallel
        device = _first_device(config)
        self._num_threads = torch.get_num_threads()
        # Each rank has its share of the threads.
        config = replace(config, num_threads=max(1, (config.num_threads or self._num_threads) // size))
        check_plan(Path(source), load_config(Path(source)), size)
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="batchjob-"))
        except OSError as error:
            raise EngineError(
                f"there is no place for the temporary files through which processes meet ({error.strerror or error}). "
                "Set TMPDIR to a directory that can be written to"
            ) from error
        self._group: Group | None = None
        self._runner: TorchRunner | None = None
        self._followers = Followers(str(source), config, device, self._directory / "meeting")
        try:
            self._followers.wait_until_ready()
            self._group = Group(0, size, device, self._directory / "meeting", self._followers.send)
            with self._group.environment():
                self._runner = TorchRunner(source, config, self._group)
        except Exception as error:
            explained = self._followers.explain(error)
            self.close()
            raise explained from (None if explained is error else error)
        except BaseException:
            self.close()
            raise

    def capacity(self) -> Capacity:
        assert self._runner is not None
        return self._runner.capacity()

    def execute(self, plan: StepPlan) -> ParallelHandle:
        """Raises EngineError where a process has ended; the runner can only be closed then."""
        assert self._runner is not None
        try:
            return ParallelHandle(self._runner.execute(plan), self._followers)
        except Exception as error:
            explained = self._followers.explain(error)
            if explained is error:
                raise
            raise explained from error

    def close(self) -> None:
        """Ends the other processes. May be called twice."""
        self._followers.close()
        if self._runner is not None:
            self._runner.close()
        if self._group is not None:
            self._group.close()
        self._group = self._runner = None
        shutil.rmtree(self._directory, ignore_errors=True)
        torch.set_num_threads(self._num_threads)


def _first_device(config: EngineConfig) -> torch.device:
    device, size = torch.device(config.device), config.tensor_parallel
    if device.type != "cuda":
        if torch.cuda.is_available():  # Transformers would split the model over these
            raise EngineError("--tensor-parallel runs on the GPUs where there are any; hide them for the CPU")
        return device
    index = device.index or 0
    number = torch.cuda.device_count()
    if index + size > number:
        raise EngineError(
            f"--tensor-parallel {size} from cuda:{index} on needs {index + size} GPUs, and PyTorch sees {number}"
        )
    return torch.device("cuda", index)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
