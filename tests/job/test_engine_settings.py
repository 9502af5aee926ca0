"""The engine's settings as flags: they reach the engine, results stay the same, and what changes results is pinned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import batchjob
from batchjob.errors import ConfigMismatchError, EngineError, UsageError
from batchjob.job import settings as prepare

Write = Callable[[Path, Iterable[Any]], Path]


@pytest.fixture
def prompts(tmp_path: Path, write_jsonl: Write) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"tell me about {i * 7919 % 101}"} for i in range(20)])


def run(model: Path, source: Path, output: Path, **settings: Any) -> list[dict[str, Any]]:
    spec = batchjob.JobSpec(
        model=str(model),
        input=(str(source),),
        output=str(output),
        device="cpu",
        progress="none",
        raw=True,
        **{"max_tokens": 12, "max_num_seqs": 6, **settings},
    )
    assert batchjob.run(spec, echo=lambda line: None).exit_code == 0
    [path] = (output / "data").iterdir()
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": "on"},
        {"async_scheduling": "on", "decode_steps_per_launch": 4},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_rows_do_not_depend_on_how_steps_are_made(
    settings: dict[str, Any], tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    for sampling in ({}, {"temperature": 1.0}):
        name = "random" if sampling else "greedy"
        expected = run(tiny_llama, prompts, tmp_path / name, **sampling)
        assert run(tiny_llama, prompts, tmp_path / f"{name}-other", **sampling, **settings) == expected


def test_settings_that_change_no_result_may_change_between_runs(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    rows = run(tiny_llama, prompts, tmp_path / "out")
    again = run(tiny_llama, prompts, tmp_path / "out", async_scheduling="on", decode_steps_per_launch=2)
    assert again == rows


@pytest.mark.parametrize(
    ("settings", "shown"),
    [({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"), ({"deterministic": True}, "deterministic")],
    ids=["kv_cache_dtype", "deterministic"],
)
def test_settings_that_change_results_are_pinned(
    settings: dict[str, Any], shown: str, tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    run(tiny_llama, prompts, tmp_path / "out")
    with pytest.raises(ConfigMismatchError, match=shown):
        run(tiny_llama, prompts, tmp_path / "out", **settings)


def test_a_deterministic_job_pins_threads_and_versions(
    tiny_llama: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads as the supervisor gives them to several workers on one CPU."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run(tiny_llama, prompts, tmp_path / "out", deterministic=True, max_tokens=1)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(ConfigMismatchError, match=r'deterministic\.device: .* 1 threads" → .* 2 threads"'):
        run(tiny_llama, prompts, tmp_path / "out", deterministic=True, max_tokens=1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(prepare, "_version", lambda package: "another")
    for package in ("torch", "transformers", "triton"):
        with pytest.raises(ConfigMismatchError, match=rf"deterministic\.{package}: .* → \"another\""):
            run(tiny_llama, prompts, tmp_path / "out", deterministic=True, max_tokens=1)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_worker_uses_as_many_threads_as_it_is_given(
    num_threads: int, tiny_llama: Path, prompts: Path, tmp_path: Path, run_cli: Any
) -> None:
    """The header says what PyTorch in the worker says."""
    flags = ("--model", tiny_llama, "--input", prompts, "--device", "cpu", "--max-tokens", "1", "--limit", "1", "--raw")
    done = run_cli("run", *flags, "--output", tmp_path / "out", "--num-threads", str(num_threads))
    assert f", {num_threads} threads" in done.stderr
    [record] = (json.loads(path.read_text()) for path in (tmp_path / "out/.batchjob/attempts").glob("*.json"))
    assert record["num_threads"] == num_threads


def test_threads_are_given_back_and_pinned_where_they_may_decide_a_bit(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    run(tiny_llama, prompts, tmp_path / "out", deterministic=True, max_tokens=1, num_threads=before + 1)
    assert torch.get_num_threads() == before
    with pytest.raises(ConfigMismatchError, match=rf'{before + 1} threads" → .* {before + 2} threads"'):
        run(tiny_llama, prompts, tmp_path / "out", deterministic=True, max_tokens=1, num_threads=before + 2)


def test_a_backend_that_cannot_be_used_says_why_and_what_to_change(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"'flash' cannot be used: .*CUDA devices only; see --attention-backend"):
        run(tiny_llama, prompts, tmp_path / "out", attention_backend="flash")


def test_fp8_keys_and_values_run_on_a_cpu_too(tiny_llama: Path, prompts: Path, tmp_path: Path) -> None:
    rows = run(tiny_llama, prompts, tmp_path / "out", kv_cache_dtype="fp8")
    assert all(row["status"] == "ok" for row in rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode_steps_per_launch": 0}, "from 1 to 64, not 0"),
        ({"num_threads": 0}, "from 1 to 1024, not 0"),
        ({"tensor_parallel": 0}, "at least 1, not 0"),
        ({"deterministic": True, "tensor_parallel": 2}, "exclude each other"),
        ({"engine": "fake", "tensor_parallel": 2}, "--engine fake has none"),
        ({"attention_backend": "warp"}, "must be one of auto, triton"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batchjob.JobSpec(**settings)
