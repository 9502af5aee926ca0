"""Swaps parts of a loaded model for faster ones: those whose forward is a known definition, if both give the same.

What a part computes is known by its definition (`known_forwards`), not by its output on a few tokens. As a second net,
one packed step is run with hooks that keep the input and the output of every part, and a replacement is run on the same
input and compared. What is not known, or differs, stays as it is: a missed speed-up, never an error. The replacements
are those of `fused`.

An original is let go as soon as it is replaced, so that merged weights need the memory of one part more, not twice
that of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from batchjob.engine.model.attention_hook import LayerCall
from batchjob.engine.model.fused import GatedMLP, PagedAttention, PreNormLayer, RMSNorm, SandwichLayer
from batchjob.engine.model.known_forwards import known_form
from batchjob.engine.model.linear import PLAIN
from batchjob.engine.model.packed_linear import PACKED, PackedLinear, can_pack, pack_linear
from batchjob_kernels.ops import cpu as cpu_ops

__all__ = ["PackedLinear", "fuse", "pack_linear"]

logger = logging.getLogger(__name__)

# Greatest difference, as a share of the largest number of an ordinary row. Float32 differs by the order of sums. With
# 16 bits, Transformers rounds between operations that are one here. Each rounding is off by half a unit in the last
# place, at most 2^-9 in bfloat16 and 2^-12 in float16, and attention multiplies it by the size of its scores before the
# exponential: 32 such roundings are allowed. Whole layers of small random models come to half of that, norms to four
# roundings. What is wrong in structure differs by far more; a finer mistake shows in float32, in the tests.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}


@dataclass(slots=True, eq=False)
class Recorded:
    """The arguments and the result of one part."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


Builder = Callable[[nn.Module], nn.Module | None]
Kinds = dict[str, dict[str, Builder]]  # kind of part -> form of its forward -> what replaces it
_LINEAR = "linear"  # stands for the form of a plain linear layer


@torch.inference_mode()
def fuse(
    module: nn.Module, calls: list[LayerCall], run_steps: Callable[[], object], *, ops: ModuleType | None = None
) -> dict[str, int]:
    """Replaces what it can inside `module`, in place; returns how many parts of each kind it replaced.

    `calls` are the attention calls by layer; the list is emptied, as it holds the originals. `run_steps` runs packed
    steps through the module, the first of them with nothing cached; parts of that one are run again. `ops` are the
    elementwise operations, beside plain products. Without them the model gets those of the CPU and packed products;
    nothing is done where these do not serve it.
    """
    call_of = {id(call.module): call for call in calls}
    calls.clear()
    kinds = _kinds(next(module.parameters()), call_of, ops)
    if not kinds:
        return {}
    recorded = _record(module, run_steps)
    done = dict.fromkeys(kinds, 0)
    for kind, builders in kinds.items():
        for path in [path for path, _ in module.named_modules() if path in recorded]:
            part = _original(module, path)
            if part is None:
                continue
            builder = builders.get(_LINEAR) or builders.get(known_form(part) or "")
            if builder is not None and _replace(module, path, part, builder, recorded):
                done[kind] += 1
                call_of.pop(id(part), None)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the originals took, which is of other sizes than what comes
    return done


def left_unfused(module: nn.Module, attentions: set[type[nn.Module]]) -> tuple[str, ...]:
    """The classes of attention (of those given) and of gated MLPs that a fused module still runs as they were."""
    names = {
        type(part).__name__
        for part in module.modules()
        if type(part) in attentions or (isinstance(getattr(part, "down_proj", None), nn.Module) and not _is_own(part))
    }
    return tuple(sorted(names))


def _is_own(part: nn.Module) -> bool:
    return type(part).__module__.startswith("batchjob.")


def _original(module: nn.Module, path: str) -> nn.Module | None:
    """The part at `path`, unless it, or what it was in, has been replaced."""
    try:
        part = module.get_submodule(path)
    except AttributeError:
        return None
    return None if _is_own(part) else part


def _kinds(weight: Tensor, call_of: dict[int, LayerCall], ops: ModuleType | None) -> Kinds:
    """The order matters: attention takes over its fused norms, and a layer its fused attention and MLP."""
    packs = ops is None
    if weight.dtype not in _TOLERANCE or (packs and not can_pack(weight)):
        return {}
    ops, linears = (cpu_ops, PACKED) if ops is None else (ops, PLAIN)

    def norm(part: nn.Module, **more: Any) -> nn.Module:
        return RMSNorm(part, ops, **more)

    def attention(part: nn.Module, **more: Any) -> nn.Module:
        return PagedAttention(part, call_of[id(part)], ops, linears, **more)

    def mlp(part: nn.Module) -> nn.Module:
        return GatedMLP(part, ops, linears)

    kinds: Kinds = {
        "norms": {"rms_norm": norm, "offset_rms_norm": partial(norm, offset=1.0)},
        "attentions": {
            "attention": attention,
            "merged_attention": attention,
            "half_angle_attention": partial(attention, half_angles=True),
            "scaled_attention": lambda part: attention(part, query_scale=_query_scale(part)),
        },
        "MLPs": {"gated_mlp": mlp, "merged_gated_mlp": mlp},
        "layers": {"pre_norm_layer": PreNormLayer, "sandwich_layer": SandwichLayer},
    }
    return kinds | {"linear layers": {_LINEAR: pack_linear}} if packs else kinds


def _query_scale(attention: Any) -> tuple[float, int]:
    """Beta and length of Ministral 3's scale of queries."""
    rope = attention.config.rope_parameters
    return float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"])


def _replace(module: nn.Module, path: str, part: nn.Module, builder: Builder, recorded: dict[str, Recorded]) -> bool:
    try:
        new = builder(part)
        if new is None:
            return False
        given = recorded[path]
        with _replayed(new, path, recorded):
            output = new(*_copy(given.args), **_copy(given.kwargs))
        if not _equal(output, given.output):
            return False
    except torch.AcceleratorError:  # nothing works on the device after that
        raise
    except Exception as error:  # of another structure than the builder expects; the part stays as it is
        if type(error).__module__.startswith("triton"):
            reason = (str(error).splitlines() or [repr(error)])[0]
            logger.warning("%s stays as it is, its kernel fails: %s", path, reason)
        return False
    module.set_submodule(path, new)
    return True


class _Replay(nn.Module):
    """Gives what a part gave, for what it was given."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    def forward(self, *args: Any) -> Any:
        if not _equal(args, self._recorded.args):
            raise ValueError("other input than in the step that was recorded")
        return _copy(self._recorded.output)


@contextmanager
def _replayed(new: nn.Module, path: str, recorded: dict[str, Recorded]) -> Iterator[None]:
    """Originals that a new part takes over (experts) only repeat what they gave: a router that is between two experts
    takes either of them, for no more than a rounding."""
    originals = {
        name: child for name, child in new.named_children() if f"{path}.{name}" in recorded and not _is_own(child)
    }
    for name in originals:
        setattr(new, name, _Replay(recorded[f"{path}.{name}"]))
    try:
        yield
    finally:
        for name, child in originals.items():
            setattr(new, name, child)


def _equal(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return _close(actual, expected)
    if isinstance(expected, tuple):
        pairs = zip(actual, expected, strict=True)
        return isinstance(actual, tuple) and all(_equal(ours, theirs) for ours, theirs in pairs)
    return actual is expected


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Row by row, as some rows of a trained model are hundreds of times larger than the others."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if expected.dtype not in _TOLERANCE:
        return bool((actual == expected).all())
    ours, theirs = (tensor.float().reshape(-1, tensor.shape[-1]) for tensor in (actual, expected))
    largest = theirs.abs().amax(dim=1)
    limit = _TOLERANCE[expected.dtype] * largest.maximum(largest.median())
    return bool(((ours - theirs).abs().amax(dim=1) <= limit).all())  # not so where it is NaN


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
