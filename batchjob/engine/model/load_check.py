"""Checks that a freshly loaded model must pass before it computes a row.

With no mask registered, a feature that our attention does not see (a window, a bias, a layer that mixes tokens by
itself) raises nothing: the output is just wrong. So the calls of every attention module are looked at, and then two
short sequences, packed and in parts, must give what the model's own eager forward gives for each alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from batchjob.engine.kv_cache import KVCache, LayerShape
from batchjob.engine.model.attention_hook import ATTENTION_NAME, LayerCall, StepContext, computing, layer_index_of
from batchjob.engine.model.positions import taken_arguments
from batchjob.errors import UnsupportedModelError
from batchjob_kernels import AttnMeta, DeviceLens

Forward = Callable[[nn.Module, Tensor, Tensor, Tensor, StepContext], Tensor]

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}  # the last within one chunk
# Greatest difference of packed and eager logits, as a share of the largest logit.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.1, torch.float16: 0.05}
# Sequence 0 comes in three parts beside a whole one, with one-token steps at the end: (sequence, start, stop) per step.
TEST_LENS = (23, 12)
_TEST_STEPS = (((0, 0, 13), (1, 0, 11)), ((1, 11, 12), (0, 13, 22)), ((0, 22, 23),))
TEST_BLOCK_SIZE = 4


def check_rotary(module: nn.Module, max_model_len: int) -> None:
    """Refuses rotary embeddings whose frequencies follow the longest position of a batch, unless none gets that far.

    Up to their original length they are constant; beyond it one long row would change the others of its step.
    """
    for part in module.modules():
        found = getattr(part, "rope_type", None)
        for layer_type, rope_type in found.items() if isinstance(found, dict) else [(None, found)]:
            if not isinstance(rope_type, str) or not any(name in rope_type for name in _LENGTH_DEPENDENT_ROPE):
                continue
            limit = _original_len(part, layer_type)
            if max_model_len > limit:
                raise UnsupportedModelError(
                    f"{type(module).__name__} has rotary type {rope_type!r}, which beyond {limit} tokens depends on "
                    f"the longest row of a batch; set --max-model-len to at most {limit}"
                )


def _original_len(part: nn.Module, layer_type: str | None) -> int:
    config: Any = part.config
    rope = getattr(config, "rope_parameters", None) or {}
    if layer_type is not None:
        rope = rope.get(layer_type, {})
    lengths = (rope.get("original_max_position_embeddings"), getattr(config, "original_max_position_embeddings", None))
    return int(next((length for length in lengths if length), config.max_position_embeddings))


def check_chunks(module: nn.Module, max_model_len: int) -> None:
    """Refuses rows that reach past the first chunk of chunked attention, or to where Llama 4 scales queries by their
    place in the batch. Up to there both are without an effect."""
    config: Any = module.config.get_text_config()  # type: ignore[union-attr, operator]
    limits = []
    if "chunked_attention" in (getattr(config, "layer_types", None) or []):
        limits.append((int(config.attention_chunk_size), "attends in chunks"))
    if config.model_type.startswith("llama4") and getattr(config, "attn_temperature_tuning", False):
        limits.append((int(config.floor_scale) - 1, "scales its queries by their place in the batch"))
    for limit, what in sorted(limits):
        if max_model_len > limit:
            raise UnsupportedModelError(
                f"{type(module).__name__} {what} beyond {limit} tokens, which is not supported; "
                f"set --max-model-len to at most {limit}"
            )


def check_layers(module: nn.Module, forward: Forward) -> list[LayerCall]:
    """Runs one forward that records every attention call, and returns them by layer. Raises UnsupportedModelError."""
    name = type(module).__name__
    config: Any = module.config.get_text_config()  # type: ignore[union-attr, operator]
    layer_types = getattr(config, "layer_types", None) or []
    if unknown := sorted(set(layer_types) - _ATTENTION_TYPES):
        raise UnsupportedModelError(f"{name} has layers of type {', '.join(unknown)}, which are not supported")
    step = StepContext()
    ids = torch.arange(4, device=_device(module))
    forward(module, ids, ids, ids, step)
    num_layers = int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)
    if len(step.calls) < num_layers:
        raise UnsupportedModelError(
            f"{name} calls its attention function {len(step.calls)} times in {num_layers} layers; "
            "the other layers do not dispatch attention through Transformers' interface"
        )
    calls = {layer_index_of(call.module): call for call in step.calls}
    num_calls = len(step.calls)  # more than layers where these have several attention modules, each with its own index
    if sorted(calls) != list(range(num_calls)):
        raise UnsupportedModelError(
            f"{name} calls its attention function {num_calls} times in {num_layers} layers, with keys and values of "
            f"{len(calls)} layers: models that attend more than once in a layer are not supported"
        )
    for index, call in sorted(calls.items()):
        layer_type = layer_types[index] if len(layer_types) == num_calls else None
        if problem := _layer_problem(call, config, layer_type):
            raise UnsupportedModelError(f"{name}, layer {index}: {problem}")
    return [calls[index] for index in range(num_calls)]


def _layer_problem(call: LayerCall, config: Any, layer_type: str | None) -> str | None:
    if not getattr(call.module, "is_causal", True):
        return "its attention is not causal"
    if call.num_heads % call.num_kv_heads:
        return f"{call.num_heads} heads cannot share {call.num_kv_heads} KV heads"
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if layer_type is not None:
        windowed = layer_type == "sliding_attention"
    if windowed and call.window is None:
        return "it has a sliding window that its attention function is not told of"
    if getattr(config, "attn_logit_softcapping", None) and call.softcap is None:
        return "it has a soft-cap that its attention function is not told of"
    return None


def _test_tokens(module: nn.Module) -> list[Tensor]:
    vocab_size = int(module.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).to(_device(module)) for length in TEST_LENS]


@torch.inference_mode()
def eager_logits(module: nn.Module, first_position: int | None = None) -> list[Tensor]:
    """Logits [length, vocab] of each test sequence alone, by the model's own attention.

    The sequences begin at `first_position`: what a model makes of positions, it is asked for there too. Without one,
    the model counts positions itself, as it does in `generate`.
    """
    module.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        return [_own_logits(module, ids, first_position) for ids in _test_tokens(module)]
    finally:
        module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]


def _own_logits(module: nn.Module, ids: Tensor, first_position: int | None) -> Tensor:
    if first_position is None:
        logits: Tensor = module(input_ids=ids[None], use_cache=False).logits[0]
        return logits
    positions = torch.arange(first_position, first_position + len(ids), device=ids.device)
    taken = taken_arguments(type(module).forward)
    more = {"position_ids": positions[None]} if taken is None or "position_ids" in taken else {}
    with computing(StepContext(positions=positions)):
        logits = module(input_ids=ids[None], use_cache=False, **more).logits[0]
    return logits


@torch.inference_mode()
def packed_logits(
    module: nn.Module,
    shapes: list[LayerShape],
    backend: ModuleType,
    forward: Forward,
    size: int = TEST_BLOCK_SIZE,
    *,
    has_device_lens: bool = False,
    first_position: int = 0,
) -> list[Tensor]:
    """The same logits from packed steps over a paged cache with blocks of `size` tokens.

    `has_device_lens`: with lengths and tables on the device, as the backend gets them in a job.
    """
    tokens = _test_tokens(module)
    device = _device(module)
    dtype = next(module.parameters()).dtype
    num_blocks = [-(-length // size) for length in TEST_LENS]
    cache = KVCache(shapes, num_blocks=sum(num_blocks), block_size=size, dtype=dtype, device=device)
    dtype = torch.int32 if has_device_lens else torch.int64
    table = torch.full((2, max(num_blocks)), cache.null_block, dtype=dtype, device=device)
    for row, ids in enumerate(torch.arange(sum(num_blocks)).flip(0).split(num_blocks)):
        table[row, : len(ids)] = ids
    parts: list[list[Tensor]] = [[], []]
    for pieces in _TEST_STEPS:
        rows = [row for row, _, _ in pieces]
        positions = [torch.arange(start, stop, device=device) for _, start, stop in pieces]
        slot_mapping = [
            table[row, where // size] * size + where % size for row, where in zip(rows, positions, strict=True)
        ]
        meta = AttnMeta(
            query_lens=[stop - start for _, start, stop in pieces],
            kv_lens=[stop for _, _, stop in pieces],
            block_table=table if has_device_lens else table[rows],
            slot_mapping=torch.cat(slot_mapping),
            block_size=size,
        )
        if has_device_lens:
            meta.device_lens = DeviceLens.of(meta.query_lens, meta.kv_lens, rows, device)
        ids = torch.cat([tokens[row][start:stop] for row, start, stop in pieces])
        logit_positions = torch.arange(len(ids), device=device)
        where = torch.cat(positions) + first_position
        logits = forward(module, ids, where, logit_positions, StepContext(meta, cache, backend))
        for row, part in zip(rows, logits.split(meta.query_lens), strict=True):
            parts[row].append(part)
    return [torch.cat(of_row) for of_row in parts]


def logits_problem(expected: list[Tensor], actual: list[Tensor]) -> str | None:
    """The difference between packed logits and the model's own, in words; None where they are equal."""
    for own, packed in zip(expected, actual, strict=True):
        limit = _TOLERANCE[own.dtype] * float(own.abs().max())
        difference = float((own - packed).abs().max())
        if not difference <= limit:  # also where it is NaN
            return (
                "other logits for packed rows than for each row alone "
                f"(difference {difference:.2g}, allowed {limit:.2g})"
            )
    return None


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
