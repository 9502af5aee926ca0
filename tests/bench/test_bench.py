"""The benchmark counts what it says it counts; its figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchjob.engine.config import EngineConfig


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    lengths = (4, 9, 20, 33)
    rows = [{"ids": list(range(10 + 3 * n, 10 + 4 * n)), "max_tokens": 3 + n % 4} for n in lengths]
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_workload_gives_exactly_the_tokens_it_asks_for(tiny_llama: Path, workload: Path) -> None:
    from batchjob.bench.workload import read_workload, run_workload

    rows = read_workload(workload)
    config = EngineConfig(max_model_len=64, kv_cache_bytes=2**20)
    result = run_workload(tiny_llama, "small", rows, config, profile=True)
    assert result.num_output_tokens == sum(row.max_tokens for row in rows)
    assert result.num_prompt_tokens == 4 + 9 + 20 + 33
    # Each token passes 2 layers of q, k, v, o, gate, up, down; each sampled one the head too.
    per_token = 2 * 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128)
    num_tokens = result.num_prompt_tokens + result.num_output_tokens - len(rows)
    assert result.flops == num_tokens * per_token + result.num_output_tokens * 2 * 64 * 512
    assert "matrix products" in (result.shares or "")


def test_the_command_prints_speed_and_limit(tiny_llama: Path, workload: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "batchjob.bench", str(workload), "--model", str(tiny_llama), "--profile"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "GFLOP/s" in done.stdout
    assert "output tok/s" in done.stdout
    assert "of it" in done.stdout
