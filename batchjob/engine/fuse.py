"""Swaps parts of a loaded model for faster ones, each kept only if it gives what the original gave.

One packed step is run with hooks that keep the input and the output of every part; a replacement is built by structure,
run on the same input and compared. What does not fit, or differs, stays as it is: a missed speed-up, never an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchjob.engine.attention import LayerCall
from batchjob.engine.fused_blocks import FusedAttention, FusedLayer, FusedMLP, FusedNorm
from batchjob.engine.packed_linear import PackedLinear, can_pack, pack_linear

__all__ = ["PackedLinear", "fuse", "pack_linear"]

_TOLERANCE = 1e-4  # greatest difference, as a share of the largest output


@dataclass(slots=True, eq=False)
class Recorded:
    """What one part was given and what it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


Builder = Callable[[nn.Module], nn.Module | None]


@torch.inference_mode()
def fuse(module: nn.Module, calls: list[LayerCall], run_steps: Callable[[], object]) -> dict[str, int]:
    """Replaces what it can inside `module`, in place; returns how many parts of each kind it replaced.

    `calls` are the attention calls by layer. `run_steps` runs packed steps through the module, the first of them with
    nothing cached; parts of that one are run again. Does nothing where linear layers cannot be packed.
    """
    if not can_pack(next(module.parameters())):
        return {}
    call_of = {id(call.module): call for call in calls}
    # In this order: attention takes over its fused norms, and a layer its fused attention and MLP.
    kinds: dict[str, tuple[Builder, ...]] = {
        "norms": (FusedNorm.of, lambda part: FusedNorm.of(part, offset=1.0)),
        "attentions": (lambda part: FusedAttention(part, call_of[id(part)]),),
        "MLPs": (FusedMLP,),
        "layers": (FusedLayer,),
        "linear layers": (pack_linear,),
    }
    recorded = _record(module, run_steps)
    done = dict.fromkeys(kinds, 0)
    for kind, builders in kinds.items():
        for path, part in list(module.named_modules()):
            if path not in recorded or type(part).__module__.startswith("batchjob."):
                continue
            if any(_replace(module, path, part, builder, recorded[path]) for builder in builders):
                done[kind] += 1
    return done


def _replace(module: nn.Module, path: str, part: nn.Module, builder: Builder, recorded: Recorded) -> bool:
    try:
        new = builder(part)
        if new is None or not _equal(new(*_copy(recorded.args), **_copy(recorded.kwargs)), recorded.output):
            return False
    except Exception:  # of another structure than the builder expects; the part stays as it is
        return False
    module.set_submodule(path, new)
    return True


def _equal(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        limit = _TOLERANCE * float(expected.abs().max())
        return actual.shape == expected.shape and float((actual - expected).abs().max()) <= limit
    if isinstance(expected, tuple):
        pairs = zip(actual, expected, strict=True)
        return isinstance(actual, tuple) and all(_equal(ours, theirs) for ours, theirs in pairs)
    return actual is expected


def _record(module: nn.Module, run_steps: Callable[[], object]) -> dict[str, Recorded]:
    """Input and output of the first call of every part, by path.

    The first step is of whole prompts, so it reads nothing that another part has left in the cache.
    """
    recorded: dict[str, Recorded] = {}
    hooks = []

    def watch(path: str, part: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in recorded:
                recorded[path] = Recorded(_copy(args), _copy(kwargs), None)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if recorded[path].output is None:
                recorded[path].output = _copy(output)

        hooks.append(part.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(part.register_forward_hook(after, with_kwargs=True))

    for path, part in module.named_modules():
        if path:
            watch(path, part)
    try:
        run_steps()
    finally:
        for hook in hooks:
            hook.remove()
    return recorded


def _copy(value: Any) -> Any:
    """Tensors copied, also in tuples and dicts, so that what happens to them in place later does not matter."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(_copy(item) for item in value)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value
