"""Threads of a CPU where no bit may depend on a row's place: products have all of them, the rest has one.

PyTorch's vectorised loops treat what is left over at the end of a thread's share by another, scalar function, which for
some operations (silu, gelu, sigmoid, ...) differs in the last bit. A thread's share ends anywhere in a row. With one
thread and a number of elements that is a multiple of the vector there is no end. Products of one shape are split in one
way, whatever they are computed from; they may have every thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_threads_of_products: list[int] = []  # one entry per `single_thread` that is open


@contextmanager
def single_thread() -> Iterator[None]:
    """Gives PyTorch one thread on the CPU, except in `all_threads`. Not for use from several threads at once."""
    threads = torch.get_num_threads()
    _threads_of_products.append(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _threads_of_products.pop()
        torch.set_num_threads(threads)


@contextmanager
def all_threads() -> Iterator[None]:
    """Gives PyTorch the threads back that it had before `single_thread`; without effect outside of that."""
    before = torch.get_num_threads()
    threads = _threads_of_products[0] if _threads_of_products else before
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm` on all threads: [batch, n, k] and [batch, k, m] -> [batch, n, m]."""
    with all_threads():
        return torch.bmm(a, b)
