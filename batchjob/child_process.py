"""A process that must not outlive the one that started it. Standard library only."""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Linux kills this process as soon as the thread that started it ends, even inside native code.

    Elsewhere it does nothing, so a reader of a pipe that ends with the parent is needed too.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)
