"""The child of a Feeder, `python -m batchjob.prompts.feeder`. It stops when its input ends, so it never outlives its
parent.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

from batchjob.child_process import listen, take_standard_input, take_standard_output
from batchjob.errors import BatchJobError
from batchjob.prompts.feeder.batches import Source
from batchjob.prompts.feeder.frames import Beat, Begun, Failure, Order, Packed, Ready, write_frame
from batchjob.records import Record

_BEAT_SECONDS = 1.0  # between two signs of life at least


def main() -> None:
    """Takes a FeederConfig, then orders, from standard input, and writes frames to standard output."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # Transformers then starts faster and smaller
    orders, out = take_standard_input(), take_standard_output()

    def send(message: object) -> None:
        write_frame(out, pickle.dumps(message, 5))

    commands: queue.Queue[Any] = queue.Queue()
    listen(orders, commands.put)
    try:
        source = Source(commands.get())
        send(Ready())
        while True:
            _carry_out(source, commands.get(), send)
    except BrokenPipeError:
        os._exit(0)
    except BatchJobError as error:
        _report(send, Failure.of(error))
    except Exception as error:
        import traceback

        traceback.print_exc()
        _report(send, Failure("FeederError", f"reading and tokenising the input failed: {error!r}"))


def _carry_out(source: Source, order: Order, send: Callable[[object], None]) -> None:
    last_sign = 0.0

    def begin(records: list[Record], seconds: float) -> None:
        nonlocal last_sign
        last_sign = time.monotonic()
        send(Begun(array("q", [record.row_index for record in records]).tobytes(), seconds))

    def beat() -> None:
        nonlocal last_sign
        if (now := time.monotonic()) >= last_sign + _BEAT_SECONDS:
            last_sign = now
            send(Beat())

    batches = source.batches(
        order.chunk,
        frozenset(array("q", order.skip)),
        alone=frozenset(array("q", order.alone)),
        poisoned=order.poisoned,
        begin=begin,
        beat=beat,
    )
    for batch in batches:
        send(Packed.of(batch))


def _report(send: Callable[[object], None], failure: Failure) -> None:
    try:
        send(failure)
    except OSError:
        os._exit(0)
    threading.Event().wait()  # until the parent closes the pipe
