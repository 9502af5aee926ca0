"""`problem(device)`: the reason why Triton's kernels cannot run on a device of this machine."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


def problem(device: torch.device) -> str | None:
    """The reason, for a person; None where they can. Compute capability is not looked at."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (PyTorch's CUDA builds bring it)"
    if device.type == "cuda":
        return _driver_problem() if torch.cuda.is_available() else None
    import triton

    return None if triton.knobs.runtime.interpret else f"Triton's kernels need a CUDA device, not {device.type}"


@cache
def _driver_problem() -> str | None:
    """Triton compiles its own access to the driver at first use, with a C compiler that it does not bring along."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
        _ = driver.active.utils
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"Triton cannot launch kernels here; it needs a C compiler and Python's header files: {reason}"
    return None
