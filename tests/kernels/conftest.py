"""What the kernels' tests share: the errors that were seen, printed at the end of `pytest -s tests/kernels`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from batchjob_kernels.triton_kernels import attention_plan

_seen: dict[tuple[str, str], list[float]] = {}


@pytest.fixture(autouse=True)
def _loop_bounds_from_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 takes a number from an array of one, which NumPy 2.5 refuses; 3.7's does not."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture(autouse=True)
def _contexts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are read apart from one key on: the tests' are small."""
    monkeypatch.setattr(attention_plan, "MIN_SAVED_KEYS", 0)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def check_close() -> Callable[[str, Tensor, Tensor, float], None]:
    """`check_close(kernel, actual, expected, tolerance)`: fails where the largest error, relative to the largest
    expected number, exceeds the tolerance (or is not a number); and remembers it for the summary."""

    def check(kernel: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
        assert actual.shape == expected.shape
        wide = expected.double().cpu()
        error = float((actual.double().cpu() - wide).abs().max() / wide.abs().max())
        _seen.setdefault((kernel, str(actual.dtype).removeprefix("torch.")), []).append(error)
        assert error <= tolerance, f"{kernel}, {actual.dtype}: relative error {error:.2e} > {tolerance:.0e}"

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _seen or config.getoption("capture") != "no":
        return
    terminalreporter.section("largest relative error per kernel and type")
    for (kernel, dtype), errors in sorted(_seen.items()):
        terminalreporter.write_line(f"{kernel:30} {dtype:10} {max(errors):8.1e}  {len(errors)} cases")
