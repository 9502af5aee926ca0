"""Changes a loaded model so that the bits of a row depend on the row alone, given steps of a fixed size.

A step of `ROWS` rows gives every product, norm and activation one shape; what is left are experts, which get as many
rows as are routed to them, memory that is not aligned, the threads of a CPU, and what PyTorch allows a GPU to round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from batchjob.engine.model.packed_linear import PackedLinear
from batchjob.errors import UnsupportedModelError
from batchjob_kernels.attention.invariant_products import all_threads

# Rows of every product. A multiple of 64, so that whatever its width a block of rows is a whole number of the CPU's
# vectors: two of 32 bfloat16 numbers is the most that PyTorch handles at a time.
ROWS = 64
_EXPERT_ROWS = 16  # of one expert's products: a block of rows is spread over many experts
_ALIGNMENT = 64  # bytes; products may treat the edges of unaligned memory by other means
_PRODUCTS = ("forward", "activated", "added", "multiplied")  # methods of linear layers that multiply


def set_switches() -> None:
    """Turns off what may round products differently from run to run. Best called before CUDA is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.set_float32_matmul_precision("highest")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    if hasattr(matmul, "allow_fp16_accumulation"):
        matmul.allow_fp16_accumulation = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time


@contextmanager
def repeatable() -> Iterator[None]:
    """Makes PyTorch add in one order, or raise RuntimeError where an operation has no such form, for a while."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def make_invariant(module: nn.Module) -> None:
    """Changes a loaded and fused model in place, for forwards of `ROWS` rows each.

    Its linear layers from then on refuse a number of rows other than that of their first call. Raises
    UnsupportedModelError for experts in a form that is not known here.
    """
    set_switches()
    _align(module)
    for path, part in module.named_modules():
        if type(part) in (nn.Linear, PackedLinear) or type(part).__name__ == "Conv1D":
            _fix_rows(part, path)
        elif any(parameter.dim() == 3 for parameter in part.parameters(recurse=False)):
            if not all(hasattr(part, name) for name in ("is_transposed", "has_gate", "has_bias", "num_experts")):
                raise UnsupportedModelError(
                    f"{path} ({type(part).__name__}) has weights in three dimensions and does not dispatch through "
                    "Transformers' experts interface; it cannot run with --deterministic"
                )
            part.forward = MethodType(invariant_experts, part)


def _align(module: nn.Module) -> None:
    """Weights mapped from a file begin anywhere."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def _fix_rows(part: nn.Module, path: str) -> None:
    """Gives a linear layer every thread of the CPU, and holds it to one number of rows."""
    seen: list[int] = []

    def fixed(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *args: Any) -> Tensor:
            rows = x.numel() // x.shape[-1]
            if rows:  # none: a step of which no logits are needed
                if not seen:
                    seen.append(rows)
                elif rows != seen[0]:
                    raise UnsupportedModelError(
                        f"{path} gets {rows} rows and had {seen[0]} before; a model whose products change their size "
                        "with the text cannot run with --deterministic"
                    )
            with all_threads():
                return method(x, *args)

        return call

    for name in _PRODUCTS:
        if hasattr(part, name):
            setattr(part, name, fixed(getattr(part, name)))


def invariant_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A forward for experts modules of Transformers' experts interface; its arguments are theirs.

    `hidden_states` [rows, hidden_size], `top_k_index` and `top_k_weights` [rows, k]. The rows of one expert are
    computed in blocks of one size, padded; the k results of a row are added in the order in which the router ranks
    them.
    """
    num_rows, k = top_k_index.shape
    chosen = top_k_index.flatten()
    results = hidden_states.new_zeros(num_rows * k, hidden_states.shape[1])
    width = self.down_proj.shape[1 if self.is_transposed else 2]
    size = _EXPERT_ROWS if width % (ROWS // _EXPERT_ROWS) == 0 else ROWS
    for expert in sorted(set(chosen.tolist())):
        if expert >= self.num_experts:  # stands for one on another device
            continue
        for places in (chosen == expert).nonzero().flatten().split(size):
            x = hidden_states.new_zeros(size, hidden_states.shape[1])
            x[: len(places)] = hidden_states[places // k]
            results[places] = _expert(self, x, expert)[: len(places)]
    weighted = results.view(num_rows, k, -1) * top_k_weights[:, :, None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


def _expert(experts: Any, x: Tensor, index: int) -> Tensor:
    gated = bool(experts.has_gate)
    x = _product(experts, x, "gate_up_proj" if gated else "up_proj", index)
    x = experts._apply_gate(x) if gated else experts.act_fn(x)
    x = _product(experts, x, "down_proj", index)
    return experts.post_expert_norm(x) if getattr(experts, "has_post_expert_norm", False) else x


def _product(experts: Any, x: Tensor, name: str, index: int) -> Tensor:
    weight = getattr(experts, name)[index]
    with all_threads():
        out = x @ weight if experts.is_transposed else nn.functional.linear(x, weight)
    return out + getattr(experts, f"{name}_bias")[index] if experts.has_bias else out
