"""Linear layers whose weights oneDNN has put into its own order once, at load.

`torch.nn.functional.linear` rearranges the weights in every call, which on a CPU takes longer than the product itself
for the few dozen rows of a step. PyTorch's own compiler uses the same two operators. Float32 on a CPU only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from batchjob.engine.model.known_forwards import is_plain

_EXPECTED_ROWS = 64  # oneDNN chooses the order for this many; it serves any other as well


def can_pack(weight: Tensor) -> bool:
    """Whether this machine and PyTorch have the operators, for a weight like this one."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear(nn.Module):
    """`y = x W^T + b` for x [..., in_features], with an activation or a second operand applied on the way out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().clone()
        with torch.inference_mode():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _EXPECTED_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def activated(self, x: Tensor, post_op: tuple[str, str]) -> Tensor:
        """act(x W^T + b), for one of the activations of `POST_OPS`."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, post_op[0], [], post_op[1])

    def combined(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        """(x W^T + b) + other, or * other; `how` is "add" or "mul", `other` of the output's shape."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, how)


# Activation -> the operator's name for it, and its variant.
POST_OPS = {"silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh"), "gelu": ("gelu", "none")}


def pack_linear(linear: nn.Module) -> PackedLinear | None:
    """The packed form of an `nn.Linear`, or of Transformers' `Conv1D` (weights transposed); None for anything else."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not can_pack(weight) or not is_plain(linear):
        return None
    if type(linear) is nn.Linear:
        return PackedLinear(weight, linear.bias)
    from transformers.pytorch_utils import Conv1D

    if type(linear) is Conv1D:
        return PackedLinear(weight.T, linear.bias)  # type: ignore[arg-type]
    return None
