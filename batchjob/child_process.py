"""Long-lived child processes: how they start, how parent and child exchange messages, and how a child ends with its
parent. Standard library only.

Messages are pickles. The parent sends them down the child's standard input, whose end tells the child that the parent
is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Ending a job is the first process's business, even if a terminal or SLURM sends its signals to every process.
_BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


# -- in the parent


def spawn(
    command: Sequence[str],
    *,
    stdout: int | None = None,
    pass_fds: Sequence[int] = (),
    process_group: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a child whose standard input is a pipe. The job's signals stay blocked in it.

    `environ` are variables on top of those of this process. Raises OSError.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            pass_fds=pass_fds,
            process_group=process_group,
            env={**os.environ, **environ} if environ else None,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def send(pipe: IO[bytes] | None, message: object) -> bool:
    """Sends one message. Returns False if the other side is gone."""
    return write(pipe, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def write(pipe: IO[bytes] | None, data: bytes) -> bool:
    """Writes all of `data` past the pipe's buffer, so that nothing is left to write when the pipe is closed. Returns
    False if the other side is gone."""
    assert pipe is not None
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(pipe.fileno(), rest) :]
    except (OSError, ValueError):  # ValueError: the pipe is closed here
        return False
    return True


def receive(pipe: IO[bytes] | None) -> Any:
    """Returns the next message. Raises EOFError once the other side is gone."""
    assert pipe is not None
    try:
        return pickle.load(pipe)
    except (OSError, ValueError, pickle.UnpicklingError) as error:  # it died within a message
        raise EOFError from error


# -- in the child


def take_standard_input() -> IO[bytes]:
    """Returns the parent's messages. What a library reads from standard input is empty from here on."""
    messages = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return messages


def take_standard_output() -> IO[bytes]:
    """Returns the way to the parent. What a library prints goes to standard error from here on."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


def listen(messages: IO[bytes], take: Callable[[Any], None]) -> None:
    """Starts a thread that hands each message to `take`, and ends this process as soon as the parent is gone.

    The message None is the parent's farewell: the thread ends after it, and the process goes on.
    """

    def run() -> None:
        try:
            while (message := receive(messages)) is not None:
                take(message)
            take(None)
        except EOFError:
            os._exit(1)

    threading.Thread(target=run, name="orders", daemon=True).start()


def die_with_parent(parent_pid: int) -> None:
    """Linux kills this process as soon as the thread that started it ends, even inside native code.

    Elsewhere it does nothing, so a child that calls it must `listen` as well.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)
