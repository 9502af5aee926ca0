"""Random signals and failing system calls in every process of the program, with random flags and writers that overlap.

Each job is held against an oracle that reads the input by itself. The long forms take FAULTS_SEED and FAULTS_COUNT.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"faults_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"faults_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ORACLE, STORM = _load("oracle"), _load("storm")


def problem_with_strace() -> str | None:
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = ["strace", "-f", "-o", "/dev/null", "-e", "inject=fsync:error=EIO:when=99", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace may not trace here: {done.stderr.strip()}"


@pytest.fixture
def make_storm(tmp_path: Path, make_fire: Any) -> Iterator[Callable[..., Any]]:
    storms = []

    def make(seed: int, totals: Any, **options: Any) -> Any:
        storms.append(STORM.Storm(seed, tmp_path, make_fire(1).environment, ORACLE.Oracle, totals, **options))
        return storms[-1]

    yield make
    for storm in storms:
        storm.close()


def test_the_oracle_knows_what_a_run_that_nothing_disturbs_makes(make_storm: Callable[..., Any]) -> None:
    for seed in (4,):
        make_storm(seed, STORM.Totals(), num_rows=60).finish()


def test_the_oracle_finds_what_is_wrong(make_storm: Callable[..., Any]) -> None:
    storm = make_storm(1, STORM.Totals(), num_rows=60)
    key, answer = next((key, answer) for key, answer in storm.expected.expected.items() if answer.text)
    storm.expected.expected[key] = replace(answer, text=f"{answer.text} more")
    with pytest.raises(AssertionError, match="more"):
        storm.finish()


def test_signals_to_any_process(make_storm: Callable[..., Any]) -> None:
    totals = STORM.Totals()
    make_storm(12, totals, num_rows=120).signals(6)
    assert totals.signals.total() >= 3, totals.text()


def test_calls_that_fail_in_any_process(make_storm: Callable[..., Any]) -> None:
    if (problem := problem_with_strace()) is not None:
        pytest.skip(problem)
    totals = STORM.Totals()
    make_storm(21, totals, num_rows=60).failures(2)
    assert totals.faults.total() >= 1, totals.text()


COUNT, FIRST_SEED = int(os.environ.get("FAULTS_COUNT", "0")), int(os.environ.get("FAULTS_SEED", "5000"))


@pytest.mark.long
@pytest.mark.timeout(6000)
def test_a_thousand_signals(make_storm: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    totals, seed, started = STORM.Totals(), FIRST_SEED, time.monotonic()
    while totals.signals.total() < (COUNT or 1000):
        make_storm(seed, totals, num_rows=400).signals(40)
        seed += 1
        tell(capsys, totals, seed, started)
    assert totals.num_twice > 0, "writers that overlap do the same rows"


@pytest.mark.long
@pytest.mark.timeout(6000)
def test_five_hundred_failing_calls(make_storm: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    if (problem := problem_with_strace()) is not None:
        pytest.skip(problem)
    totals, seed, started = STORM.Totals(), FIRST_SEED, time.monotonic()
    while totals.faults.total() < (COUNT or 500):
        make_storm(seed, totals, num_rows=80).failures(8)
        seed += 1
        tell(capsys, totals, seed, started)


def tell(capsys: pytest.CaptureFixture[str], totals: Any, seed: int, started: float) -> None:
    with capsys.disabled():
        print(f"\nseeds {FIRST_SEED} to {seed - 1}, {time.monotonic() - started:.0f} s: {totals.text()}", flush=True)
