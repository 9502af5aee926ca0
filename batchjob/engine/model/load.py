"""Loads a causal language model through Transformers with our attention inside, or refuses it by name.

Local directories and safetensors only; no code from a checkpoint is run. The config object is private to the model,
because Transformers writes the name of the attention function into it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from batchjob.engine.kv_cache import LayerShape
from batchjob.engine.model.attention_hook import LayerCall, StepContext, computing, current_step
from batchjob.engine.model.checkpoint import described, load_config, load_module
from batchjob.engine.model.fuse import fuse, left_unfused
from batchjob.engine.model.length_check import SMALL_WINDOW, first_positions, short_windows
from batchjob.engine.model.load_check import (
    TEST_BLOCK_SIZE,
    check_chunks,
    check_layers,
    check_rotary,
    eager_logits,
    logits_problem,
    packed_logits,
)
from batchjob.engine.model.positions import give_positions, taken_arguments
from batchjob.errors import BatchJobError, UnsupportedModelError
from batchjob_kernels.attention.select import Selection

Forward = Callable[[Tensor, Tensor, Tensor, StepContext], Tensor]
ChooseBackend = Callable[[list[LayerCall]], Selection]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model that takes packed steps, and what sizes the cache and the sampler."""

    module: nn.Module
    shapes: list[LayerShape]  # of the KV cache, by layer
    vocab_size: int  # width of the logits
    name: str  # of its class
    backend: Selection  # of attention
    fused: dict[str, int]  # kind of part -> how many were replaced by faster ones
    unfused: tuple[str, ...] = ()  # classes of attention and MLPs that were to be fused and run as they are
    unknown_ids: Tensor | None = None  # int64; ids that stand for no token, which are never to be drawn

    def forward(self, input_ids: Tensor, positions: Tensor, logit_positions: Tensor, step: StepContext) -> Tensor:
        """`input_ids` and `positions` int64 [num_tokens] -> the logits [n, vocab_size] after the tokens
        `logit_positions`, int64 [n].

        The logits of `unknown_ids` are -inf."""
        logits = packed_forward(self.module, input_ids, positions, logit_positions, step)
        return logits if self.unknown_ids is None else logits.index_fill_(1, self.unknown_ids, -torch.inf)


def load_model(
    source: str | Path | Callable[[], nn.Module],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    choose_backend: ChooseBackend,
    block_size: int,
    use_fused: bool = True,
    ops: ModuleType | None = None,
    tensor_parallel: int = 1,
) -> LoadedModel:
    """`source` is a directory with a checkpoint, or a function that builds a model on the device in `dtype`, made with
    `attn_implementation=ATTENTION_NAME` after `register()`. `ops` are the operations of fused parts on a GPU.
    With `tensor_parallel` this process loads its share of a checkpoint, and the others theirs, at the same time.

    Raises UnsupportedModelError (the message says what the engine cannot do) or EngineError (it does not load).
    """
    if callable(source):
        build = source
    else:
        path, config = Path(source), load_config(Path(source))

        def build() -> nn.Module:
            return load_module(path, config, dtype, device, tensor_parallel)

    for with_fused in (True, False) if use_fused else (False,):
        module = build()
        model = prepare_model(
            module,
            max_model_len=max_model_len,
            choose_backend=choose_backend,
            block_size=block_size,
            use_fused=with_fused,
            ops=ops,
        )
        if model is not None:
            if use_fused and not with_fused:  # its fused parts gave other results
                model.unfused = (model.name,)
            return model
        del module
    raise AssertionError("a model without fused parts is accepted or refused")


def prepare_model(
    module: nn.Module,
    *,
    max_model_len: int,
    choose_backend: ChooseBackend,
    block_size: int,
    use_fused: bool = True,
    ops: ModuleType | None = None,
) -> LoadedModel | None:
    """Checks that a Transformers model built with our attention gives, packed, what it gives by itself, and fuses it.

    None where it does not any more once its parts are fused; it is spoilt then. Raises UnsupportedModelError.
    """
    with _refusing(type(module).__name__):
        return _prepared(
            module,
            max_model_len=max_model_len,
            choose_backend=choose_backend,
            block_size=block_size,
            use_fused=use_fused,
            ops=ops,
        )


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Any error that a model raises while it is checked refuses it; a lack of memory is no fault of the model."""
    try:
        yield
    except (BatchJobError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name} fails on packed input: {described(error)}") from error


def _prepared(
    module: nn.Module,
    *,
    max_model_len: int,
    choose_backend: ChooseBackend,
    block_size: int,
    use_fused: bool,
    ops: ModuleType | None,
) -> LoadedModel | None:
    name = type(module).__name__
    module.requires_grad_(False).eval()
    check_rotary(module, max_model_len)
    check_chunks(module, max_model_len)
    give_positions(module)
    calls = check_layers(module, packed_forward)
    _watch_hidden_states(module)
    shapes = [LayerShape(call.num_kv_heads, call.head_dim) for call in calls]
    backend = choose_backend(calls)
    test_block_size = block_size if backend.module.COMPILED_FOR_BLOCK_SIZE else TEST_BLOCK_SIZE

    def packed(first_position: int = 0) -> list[Tensor]:
        return packed_logits(
            module,
            shapes,
            backend.module,
            packed_forward,
            test_block_size,
            has_device_lens=backend.module.USES_DEVICE_LENS,
            first_position=first_position,
        )

    expected: dict[int, list[Tensor]] = {}  # by first position
    for first_position in first_positions(module.config.get_text_config(), max_model_len):  # type: ignore[union-attr, operator]
        expected[first_position] = eager_logits(module, first_position or None)
        if problem := logits_problem(expected[first_position], packed(first_position)):
            raise UnsupportedModelError(
                f"{name} gives {problem}: {_cause(module, expected[0])}"
                if first_position == 0
                else f"{name} gives {problem}, at positions from {first_position} on; "
                f"set --max-model-len to at most {first_position}"
            )
    windows = {call.window for call in calls if call.window is not None}
    with_short_windows = _check_windows(module, windows, packed)
    attentions = {type(call.module) for call in calls}
    fused = fuse(module, calls, packed, ops=ops) if use_fused else {}
    if fused and not all(_still_equal(logits, partial(packed, at)) for at, logits in expected.items()):
        return None
    if fused and with_short_windows is not None:
        with short_windows(module, windows):
            if not _still_equal(with_short_windows, packed):
                return None
    left = left_unfused(module, attentions) if fused else ()
    return LoadedModel(module, shapes, expected[0][0].shape[1], name, backend, fused, left)


def _cause(module: nn.Module, expected: list[Tensor]) -> str:
    """The reason why packed logits differ from the model's own, from position 0 on."""
    try:
        is_counted = logits_problem(expected, eager_logits(module, 0)) is None
    except TypeError:
        is_counted = False
    if not is_counted:
        return "it does not count the positions of its tokens from 0, or takes none"
    return "some part of it mixes tokens outside of its attention function"


def _check_windows(module: nn.Module, windows: set[int], packed: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    """Compares once more with sliding windows of a few tokens; returns the model's own logits with them, or None where
    there are no windows. Raises UnsupportedModelError."""
    name = type(module).__name__
    with short_windows(module, windows) as has_windows:
        if not has_windows:
            return None
        longest = max((call.window or 0 for call in check_layers(module, packed_forward)), default=0)
        if longest > SMALL_WINDOW:
            raise UnsupportedModelError(f"{name} has a sliding window of {longest} tokens that cannot be checked")
        expected = eager_logits(module)
        if problem := logits_problem(expected, packed()):
            raise UnsupportedModelError(
                f"{name} gives {problem}, once a row is longer than the sliding_window of its configuration: the "
                "model's own code does not use that window as its attention is told. If the model was made without "
                "one, set sliding_window to null in its config.json"
            )
        return expected


def _watch_hidden_states(module: nn.Module) -> None:
    """Makes steps that ask for it learn at which tokens the model gives numbers that are not finite.

    To be called before parts are fused.
    """
    ids = torch.arange(4, device=next(module.parameters()).device)
    called: list[nn.Module] = []
    # The base model, or where a model calls past it, the decoder within: the outermost one that gives hidden states.
    bases = [part for part in module.modules() if part is not module and hasattr(part, "base_model_prefix")]
    hooks = [base.register_forward_hook(lambda base, _args, _output: called.append(base)) for base in bases]
    packed_forward(module, ids, ids, ids, StepContext())
    for hook in hooks:
        hook.remove()

    def look(_: nn.Module, args: Any, output: Any) -> None:
        step = current_step()
        if step is not None and step.check_finite:
            step.nonfinite = ~torch.isfinite(output[0][0]).all(dim=1)

    if called:
        called[-1].register_forward_hook(look)
    step = StepContext(check_finite=True)
    packed_forward(module, ids, ids, ids, step)
    if step.nonfinite is None or len(step.nonfinite) != len(ids):
        raise UnsupportedModelError(f"{type(module).__name__} does not show its last hidden states to a hook")


def _still_equal(expected: list[Tensor], packed: Callable[[], list[Tensor]]) -> bool:
    try:
        return logits_problem(expected, packed()) is None
    except Exception:  # a fused part that another one reaches into; the caller continues without any
        logger.debug("fused parts", exc_info=True)
        return False


@torch.inference_mode()
def packed_forward(
    module: nn.Module, input_ids: Tensor, positions: Tensor, logit_positions: Tensor, step: StepContext
) -> Tensor:
    more = {"position_ids": positions[None], "logits_to_keep": logit_positions, "step": step}
    taken = taken_arguments(type(module).forward)
    step.positions = positions
    with computing(step):
        logits: Tensor = module(
            input_ids=input_ids[None],
            use_cache=False,
            **{name: value for name, value in more.items() if taken is None or name in taken},
        ).logits[0]
    return logits if len(logits) == len(logit_positions) else logits[logit_positions]
