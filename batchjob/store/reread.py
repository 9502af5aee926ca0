"""Repeated reads, for files that a file server has lost track of.

ESTALE says that a file was replaced or removed on the server, or that the server came back with another view of it.
Opening the name once more settles which; a read may be repeated any number of times.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSES = (0.1, 0.5, 2.0, 5.0)  # seconds between the tries


def reread(read: Callable[[], T]) -> T:
    """The result of `read`, which opens what it reads. Raises its OSError, ESTALE only after five tries."""
    for pause in PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(pause)
    return read()
