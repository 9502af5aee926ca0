"""The linear layers of fused parts: the interface of a kind of them (`Linears`), and `PLAIN`, PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Linears(NamedTuple):
    """A kind of linear layers. Both are built from a weight [out_features, in_features] and a bias or None.

    `linear` gives modules with `forward(x)`, `added(x, residual)`, which is residual + forward(x) and may change
    `residual`, and `adds_in_product`, which says whether `added` costs no more than `forward`.
    `gated` takes gate and up below each other in one weight, an activation and the elementwise operations; its modules
    give act(gate(x)) * up(x).
    """

    linear: Callable[[Tensor, Tensor | None], nn.Module]
    gated: Callable[[Tensor, Tensor | None, str, ModuleType], nn.Module]


class PlainLinear(nn.Module):
    """y = x W^T + b by PyTorch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.adds_in_product = bias is None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + forward(x), in place; without a bias by the product itself."""
        if self.bias is None:
            return residual.addmm_(x, self.weight.t())
        return residual.add_(self(x))


class PlainGated(nn.Module):
    """Gate and up as one product, and one elementwise operation."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str, ops: ModuleType) -> None:
        super().__init__()
        self.gate_up = PlainLinear(weight, bias)
        self._activation, self._ops = activation, ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.act_and_mul(self.gate_up(x), self._activation)


PLAIN = Linears(PlainLinear, PlainGated)


def merged(parent: nn.Module, *names: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of linear layers of one input, their outputs side by side. A single one's are not copied.

    Raises TypeError for anything but an `nn.Linear`.
    """
    linears = [getattr(parent, name) for name in names]
    if any(type(linear) is not nn.Linear for linear in linears):
        raise TypeError("not plain linear layers")
    weights = [linear.weight.detach() for linear in linears]
    biases = [None if linear.bias is None else linear.bias.detach() for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(bias is None for bias in biases):
        return weight, None
    pairs = zip(weights, biases, strict=True)
    return weight, torch.cat([part.new_zeros(len(part)) if bias is None else bias for part, bias in pairs])
