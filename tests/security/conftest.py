"""Gives the tests of security a way to run a job in this process, and one to look at every byte that it left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchjob
from batchjob.report.result import RunResult


@pytest.fixture
def run_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunResult, str]]:
    """`run_job(source, **settings)` runs with the fake engine into tmp_path/out; gives the result and what was said."""
    from inline_feeder import InlineFeeder

    monkeypatch.setattr("batchjob.prompts.feeder.Feeder", InlineFeeder)

    def run(source: Path, **settings: Any) -> tuple[RunResult, str]:
        said: list[str] = []
        spec = batchjob.JobSpec(
            **{
                "input": (str(source),),
                "output": str(tmp_path / "out"),
                "engine": "fake",
                "progress": "none",
                "max_error_rate": 1.0,
                **settings,
            }
        )
        return batchjob.run(spec, echo=said.append), "\n".join(said)

    return run
