"""A process with one share of a model that is split: `python -m batchjob.engine.parallel.follower`.

Standard input brings a `Setup` and then the inputs of steps, standard output takes `Report`s; both are pickles, from
and to the process that started this one, and nothing else reads or writes them. It is gone within a second of that
process.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from typing import IO, TYPE_CHECKING, Any

from batchjob.engine.openmp import prepare_openmp
from batchjob.errors import BatchJobError, UnsupportedModelError

if TYPE_CHECKING:
    from batchjob.engine.parallel.runner import Setup

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    orders, reports = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What a library reads or prints must not be ours.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    prepare_openmp()
    setup: Setup = pickle.load(orders)
    _die_with_parent(setup.parent_pid)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders, messages), name="orders", daemon=True).start()
    code = 0
    try:
        _run(setup, messages, reports)
    except BaseException as error:
        code = 1
        _report(reports, error)
    os._exit(code)  # not through the interpreter's end, where native libraries at times crash or hang


def _run(setup: Setup, messages: queue.SimpleQueue[Any], reports: IO[bytes]) -> None:
    import torch

    from batchjob.engine.parallel.group import Group
    from batchjob.engine.parallel.runner import Report
    from batchjob.engine.runner import TorchRunner

    config = setup.config
    pickle.dump(Report(), reports)
    reports.flush()
    group = Group(setup.rank, config.tensor_parallel, torch.device(config.device), setup.meeting)
    with group.environment():
        runner = TorchRunner(setup.source, config, group)
    while (inputs := messages.get()) is not None:
        runner.follow(inputs)


def _report(reports: IO[bytes], error: BaseException) -> None:
    from batchjob.engine.parallel.runner import Report

    if isinstance(error, BatchJobError):
        message = str(error)
    else:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
    try:
        pickle.dump(Report(message, isinstance(error, UnsupportedModelError)), reports)
        reports.flush()
    except OSError:
        pass  # nobody is left to hear it


def _listen(orders: IO[bytes], messages: queue.SimpleQueue[Any]) -> None:
    """Reads ahead, so that the first rank never waits for this one to read."""
    while True:
        try:
            message = pickle.load(orders)
        except (EOFError, OSError, pickle.UnpicklingError):
            os._exit(1)  # the first rank is gone
        messages.put(message)
        if message is None:
            return


def _die_with_parent(parent_pid: int) -> None:
    """On Linux even inside native code; elsewhere, and in any case, the end of the pipe tells."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    main()
