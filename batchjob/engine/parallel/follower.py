"""A process with one share of a model that is split: `python -m batchjob.engine.parallel.follower`.

Standard input brings a `Setup` and then the inputs of steps, standard output takes `Report`s; both are pickles, from
and to the process that started this one, and nothing else reads or writes them. It is gone within a second of that
process.
"""

from __future__ import annotations

import os
import queue
import traceback
from typing import IO, TYPE_CHECKING, Any

from batchjob.child_process import die_with_parent, listen, receive, send, take_standard_input, take_standard_output
from batchjob.engine.openmp import prepare_openmp
from batchjob.errors import BatchJobError, UnsupportedModelError

if TYPE_CHECKING:
    from batchjob.engine.parallel.runner import Setup


def main() -> None:
    orders, reports = take_standard_input(), take_standard_output()
    prepare_openmp()
    setup: Setup = receive(orders)
    die_with_parent(setup.parent_pid)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listen(orders, messages.put)  # reads ahead, so that the first rank never waits for this one to read
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
    send(reports, Report())
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
    send(reports, Report(message, isinstance(error, UnsupportedModelError)))


if __name__ == "__main__":
    main()
