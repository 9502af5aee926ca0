"""`select`: the backend for a need. The first of a preference that does not refuse, or the one that was asked for."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from batchjob_kernels.attention.meta import Requirements

# By type of device, the first choice first. A name is that of a module beside this one.
_PREFERENCE = {
    "cuda": ("triton", "flash", "gather", "invariant", "reference"),
    "cpu": ("gather", "invariant", "reference"),
}
BACKENDS = tuple(dict.fromkeys(name for names in _PREFERENCE.values() for name in names))


class Selection(NamedTuple):
    name: str
    module: ModuleType
    reason: str  # for the log: why this one, and why none before it


def select(name: str, need: Requirements) -> Selection:
    """`name` is "auto" or one of BACKENDS. Raises ValueError, whose message says why it cannot be that one."""
    if name != "auto":
        module = backend(name)
        refusal: str | None = module.refusal(need)
        if refusal is not None:
            raise ValueError(f"the attention backend {name!r} cannot be used: {refusal}")
        return Selection(name, module, "asked for")
    reasons: list[str] = []
    for candidate in _PREFERENCE[need.device.type]:
        module = backend(candidate)
        refusal = module.refusal(need)
        if refusal is None:
            return Selection(candidate, module, "; ".join(reasons) or f"the first choice on {need.device.type}")
        reasons.append(f"not {candidate}: {refusal}")
    raise ValueError("no attention backend can be used: " + "; ".join(reasons))


def backend(name: str) -> ModuleType:
    """The module of a name in BACKENDS. Raises ValueError."""
    if name not in BACKENDS:
        raise ValueError(f"there is no attention backend {name!r}: choose one of {', '.join(BACKENDS)}")
    return importlib.import_module(f"batchjob_kernels.attention.{name}")
