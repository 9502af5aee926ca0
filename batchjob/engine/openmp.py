"""One setting of PyTorch's thread pool on a CPU, for the time before PyTorch is imported. Standard library only."""

from __future__ import annotations

import os

# Turns of the loop in which a thread of GNU OpenMP waits for work before it sleeps. Its own default, 300,000, makes a
# step ten times slower as soon as another process wants one of the cores; to sleep at once costs a third otherwise.
# Measured with SmolLM2-135M on two cores: the default's speed when quiet, a quarter of it beside one busy process.
_SPIN_COUNT = "10000"


def prepare_openmp() -> None:
    """Has no effect where the user has set a wait policy, or where PyTorch is loaded already."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
