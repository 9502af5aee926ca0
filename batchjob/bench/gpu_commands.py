"""Parts of `gpu_check` that start the program itself: a job that is killed and resumed, and the start-up."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from batchjob.bench.gpu_task import Report, Task, environment

_START = "import json, sys; from batchjob.bench.gpu_commands import start_up; start_up(json.loads(sys.argv[1]))"


# -- kill and resume


def kill_and_resume(task: Task, report: Report) -> None:
    """`batchjob run` with a small random model: killed without warning once rows are there, then run again. Every row
    must be in the output once, whole. Options: `rows`, `max_tokens`."""
    num_rows, max_tokens = task.options["rows"], task.options["max_tokens"]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        directory = Path(name)
        _save_model(directory / "model")
        lines = (json.dumps({"id": i, "text": f"Row {i} says {'on and ' * (i % 9)}on."}) for i in range(num_rows))
        (directory / "input.jsonl").write_text("".join(line + "\n" for line in lines))
        command = [sys.executable, "-m", "batchjob", "run", "--model", str(directory / "model")]
        command += ["--input", str(directory / "input.jsonl"), "--output", str(directory / "out"), "--prompt", "text"]
        command += ["--device", task.device, "--dtype", task.dtype_name, "--chunk-rows", "16", "--max-num-seqs", "8"]
        command += ["--max-tokens", str(max_tokens), "--ignore-eos", "--raw", "--progress", "none"]
        command += ["--max-model-len", str(max_tokens + 128), "--kv-cache-memory", "64MiB"]
        started = time.monotonic()
        process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        seen = 0
        while process.poll() is None and seen < num_rows // 8 and report.seconds_left > 12:
            seen = _finished_rows(directory / "out")
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        errors = process.communicate()[1].decode(errors="replace")
        report.add(killed=process.returncode == -signal.SIGKILL, rows_when_killed=seen)
        report.add(seconds_to_kill=time.monotonic() - started)
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(
                f"the job ended by itself with {process.returncode} before it was killed: {errors[-2000:]}"
            )
        if not seen:
            raise RuntimeError(f"no row was finished in time: {errors[-2000:]}")
        time.sleep(0.5)  # the worker dies with its supervisor; its lock goes with it
        before = _finished_rows(directory / "out")
        started = time.monotonic()
        done = subprocess.run(
            command,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=max(1.0, report.seconds_left - 2),
            check=False,
        )
        report.add(rows_before_resume=before, resume_seconds=time.monotonic() - started, exit_code=done.returncode)
        if done.returncode:
            raise RuntimeError(f"the resumed job ended with {done.returncode}: {done.stderr[-2000:]}")
        rows = _read_rows(directory / "out" / "data")
    counts = collections.Counter(row["id"] for row in rows)
    wrong = [i for i in range(num_rows) if counts[i] != 1]
    failed = [row["id"] for row in rows if row["status"] != "ok"]
    report.add(rows=len(rows), not_once=wrong[:20], not_ok=failed[:20])
    if wrong or failed or len(rows) != num_rows:
        raise AssertionError(f"{len(rows)} rows of {num_rows}, {len(wrong)} not exactly once, {len(failed)} failed")


def _finished_rows(output: Path) -> int:
    """Rows in the logs of open chunks and in finished parts, about."""
    logged = 0
    for path in (output / ".batchjob" / "wal").glob("*/*.log"):
        try:
            logged += path.read_bytes().count(b"\n")
        except FileNotFoundError:
            pass
    return logged + 16 * sum(1 for _ in (output / "data").glob("*.parquet"))


def _read_rows(data: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    return [row for path in sorted(data.glob("*.parquet")) for row in pyarrow.parquet.read_table(path).to_pylist()]


def _save_model(directory: Path) -> None:
    """A tiny Qwen3 of random weights, with a tokenizer whose tokens are the 256 bytes."""
    import torch

    from batchjob.bench.gpu_shapes import SHAPES, build

    shape = SHAPES["Qwen3-0.6B"].tiny()
    model: Any = build(shape, device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", std=0.1)
    model.save_pretrained(directory)
    tokens = [*_byte_symbols(), "<end>"]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 256, "content": "<end>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "model_max_length": shape.max_position,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (Radford et al., 2019, GPT-2)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


# -- start


def starts(task: Task, report: Report) -> None:
    """Seconds from the start of a process to its first token and to steady work, with empty caches of compiled kernels
    and again with full ones. Options: `shape`."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        caches = {
            "TRITON_CACHE_DIR": f"{name}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor",
            "CUDA_CACHE_PATH": f"{name}/cuda",
            "XDG_CACHE_HOME": f"{name}/cache",
        }
        for label in ("cold", "warm"):
            path = Path(name, label + ".json")
            request = {
                "task": {"device": task.device, "tiny": task.tiny, "settings": task.settings, "options": task.options},
                "started": time.time(),
                "path": str(path),
            }
            done = subprocess.run(
                [sys.executable, "-c", _START, json.dumps(request)],
                env=environment(**caches),
                capture_output=True,
                text=True,
                timeout=max(1.0, report.seconds_left - 2),
                check=False,
            )
            if path.exists():
                report.add(**{label: json.loads(path.read_text())})
            if done.returncode:
                raise RuntimeError(f"the {label} start ended with {done.returncode}: {done.stderr[-2000:]}")


def start_up(request: dict[str, Any]) -> None:
    """The work of the process that `starts` measures. Times are counted from its own start."""
    points: dict[str, float] = {}

    def reached(name: str) -> None:
        points[name] = time.time() - request["started"]
        Path(request["path"]).write_text(json.dumps(points))

    reached("python")
    from batchjob.bench import gpu_engine
    from batchjob.bench.workload import NoText, Row, add_rows
    from batchjob.engine import Engine
    from batchjob.engine.runner import TorchRunner

    reached("imports")
    task = Task(function="", deadline=0.0, result_path="", log_path="", **request["task"])
    shape = gpu_engine.shape_of(task)
    rows = gpu_engine.workload("published", tiny=task.tiny)
    config = gpu_engine.make_config(task, rows)
    runner = TorchRunner(lambda: gpu_engine.model_of(task, shape), config)
    engine = Engine(runner, NoText(), config)
    reached("engine")
    add_rows(engine, [Row(rows[0].token_ids, 1)])
    while engine.has_unfinished():
        engine.step()
    reached("first token")
    gpu_engine.warm_up(engine, rows, largest_id=shape.vocab_size - 1)
    reached("steady")
    sys.stdout.flush()
    os._exit(0)
