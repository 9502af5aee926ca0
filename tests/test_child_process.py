"""Long-lived children: their messages, the job's signals, and their end with the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from batchjob.child_process import receive, send, spawn

ECHO = """
import os, signal, threading
from batchjob import child_process
messages, replies = child_process.take_standard_input(), child_process.take_standard_output()
print("what a library prints")
assert os.read(0, 1) == b""
over = threading.Event()
def take(message):
    child_process.send(replies, message)
    if message is None: over.set()
child_process.send(replies, signal.pthread_sigmask(signal.SIG_BLOCK, []))
child_process.listen(messages, take)
over.wait()
os._exit(3)
"""


def start() -> subprocess.Popen[bytes]:
    return spawn((sys.executable, "-c", ECHO), stdout=subprocess.PIPE, environ={"OMP_NUM_THREADS": "1"})


def end(child: subprocess.Popen[bytes]) -> int:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    child.stdout.close()
    return child.wait(10)


def test_messages_go_both_ways_and_the_farewell_ends_only_the_listening() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = start()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} <= receive(child.stdout)
    for message in ({"rows": [1, 2]}, b"x" * (1 << 20), None):
        assert send(child.stdin, message)
        assert receive(child.stdout) == message
    assert end(child) == 3


def test_a_child_ends_when_the_pipe_of_its_parent_does() -> None:
    child = start()
    receive(child.stdout)
    assert end(child) == 1


def test_the_other_side_is_gone() -> None:
    child = start()
    receive(child.stdout)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    assert not send(child.stdin, "hello")
    with pytest.raises(EOFError):
        receive(child.stdout)
    end(child)
    assert not send(child.stdin, "the pipe is closed here too")
