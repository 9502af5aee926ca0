"""Shared by the kernels' tests: the errors that were seen, printed at the end of `pytest -s tests/kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from batchjob_kernels.triton_kernels import attention_plan

_seen: dict[tuple[str, str], list[float]] = {}


@pytest.fixture(autouse=True)
def _contexts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
