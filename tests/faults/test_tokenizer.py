"""The tokeniser's process dies, hangs or panics under a run: the engine knows nothing of it, and one row fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

WORDS = {0: "deadly", 200: "leaves", 401: "segfault", 601: "panics"}
ROWS = 700


@pytest.fixture
def fire(make_fire: Any) -> Any:
    """A job in which a few rows bring the tokeniser down, each in its own way; the first row is one of them."""
    fire = make_fire(ROWS, chunk_rows=300)
    lines = fire.source.read_text().splitlines()
    for row, word in WORDS.items():
        lines[row] = json.dumps({"n": row, "prompt": f"a word that {word}"})
    fire.source.write_text("\n".join(lines) + "\n")
    return fire


@pytest.mark.parametrize("flags", [(), ("--no-supervisor",), ("--devices", "cpu,cpu")], ids=" ".join)
def test_rows_that_bring_the_tokeniser_down(fire: Any, flags: tuple[str, ...]) -> None:
    done = subprocess.run(
        fire.command(*flags, "--max-num-seqs", "8"),
        env=fire.environment(FAULTS_TOKENIZER="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = fire.rows()
    assert [row["row_index"] for row in rows] == list(range(ROWS))
    kinds = {row["row_index"]: row["error_type"] for row in rows if row["row_index"] % 17 != 5 and row["error_type"]}
    assert kinds == {
        0: "tokenizer_crash",
        200: "tokenizer_crash",
        401: "tokenizer_crash",
        601: "invalid_encoding",
    }
    assert "was killed by SIGKILL" in rows[0]["error_message"]
    assert "exit code 3" in rows[200]["error_message"]
    assert "was killed by SIGSEGV" in rows[401]["error_message"]
    assert "Option::unwrap" in rows[601]["error_message"]
    assert "restart " not in done.stderr, "the worker lives on"
    assert "halved" not in done.stderr
    assert 6 <= done.stderr.count("and is started again") <= 9
    for path in (fire.output / ".batchjob" / "attempts").glob("*.json"):
        record = json.loads(path.read_text())
        assert (record["limits_halved"], record["num_suspects"], record["restarts"]) == (0, 0, 0)


def tokenisers(pid: int) -> list[int]:
    """The tokenizer processes among all that a process has started, directly or not."""
    found, parents = [], [pid]
    while parents:
        pid = parents.pop()
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                for child in map(int, (task / "children").read_text().split()):
                    parents.append(child)
                    if b"batchjob.prompts.feeder" in Path(f"/proc/{child}/cmdline").read_bytes():
                        found.append(child)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("flags", [(), ("--no-supervisor",)], ids=" ".join)
def test_a_tokeniser_that_is_killed_again_and_again_costs_no_row(make_fire: Any, flags: tuple[str, ...]) -> None:
    fire = make_fire(1000, chunk_rows=50)
    process = fire.start(*flags, step=0.005)
    killed: set[int] = set()
    deadline = time.monotonic() + 60
    while process.poll() is None and len(killed) < 3:
        assert time.monotonic() < deadline
        if fire.parts() and len(fire.parts()) > 4 * len(killed):
            for pid in set(tokenisers(process.pid)) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.02)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    fire.check_complete()
    assert len(killed) == 3
    assert "halved" not in printed
    assert "restart 1" not in printed
    assert "tokenizer_crash" not in printed


def test_validate_finds_the_rows_that_a_run_would_lose_its_tokeniser_at(make_fire: Any, tiny_llama: Path) -> None:
    fire = make_fire(40)
    lines = fire.source.read_text().splitlines()
    lines[3], lines[30] = '{"prompt": "a deadly word"}', '{"prompt": "it panics"}'
    fire.source.write_text("\n".join(lines) + "\n")
    flags = ["--model", str(tiny_llama), "--input", str(fire.source), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "batchjob", "validate", *flags],
        env=fire.environment(FAULTS_TOKENIZER="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 65, done.stderr
    report = json.loads(done.stdout)
    assert report["num_rows"] == 40
    assert {kind: found["count"] for kind, found in report["errors"].items()} == {
        "tokenizer_crash": 1,
        "invalid_encoding": 1,
        "invalid_json": 3,
    }
