"""`PACKED`: linear layers whose weights oneDNN has put into its own order once, at load.

`torch.nn.functional.linear` rearranges the weights in every call, which on a CPU takes longer than the product itself
for the few dozen rows of a step. PyTorch's own compiler uses the same two operators. Float32 on a CPU only.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from batchjob.engine.model.known_forwards import is_plain
from batchjob.engine.model.linear import Linears

_EXPECTED_ROWS = 64  # oneDNN chooses the order for this many; it serves any other as well


def can_pack(weight: Tensor) -> bool:
    """True where this machine and PyTorch have the operators for a weight like this one."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear(nn.Module):
    """y = x W^T + b for x [..., in_features], with an activation or a second operand applied on the way out."""

    adds_in_product = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Raises TypeError for a weight that cannot be packed."""
        super().__init__()
        if not can_pack(weight):
            raise TypeError("the weight cannot be packed")
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().clone()
        with torch.inference_mode():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _EXPECTED_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def activated(self, x: Tensor, post_op: tuple[str, str]) -> Tensor:
        """act(x W^T + b), for one of the activations of `POST_OPS`."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, post_op[0], [], post_op[1])

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + (x W^T + b)."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")

    def multiplied(self, x: Tensor, factor: Tensor) -> Tensor:
        """(x W^T + b) * factor, which is of the output's shape."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self._weight, self._bias, "mul")


class PackedGated(nn.Module):
    """Gate and up as two products that hold the activation and the multiplication."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str, _: ModuleType) -> None:
        super().__init__()
        biases = (None, None) if bias is None else bias.chunk(2)
        self.gate, self.up = (PackedLinear(*pair) for pair in zip(weight.chunk(2), biases, strict=True))
        self._post_op = POST_OPS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.up.multiplied(x, self.gate.activated(x, self._post_op))


PACKED = Linears(PackedLinear, PackedGated)


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
