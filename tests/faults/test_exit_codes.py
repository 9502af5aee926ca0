"""Row errors and the exit code: the table in docs/reliability.md, run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchjob.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
HEAD = "| failed rows of 100 |"


def table() -> list[tuple[int, str, int]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(HEAD))
    rates = [re.sub(r"[^\d.]", "", cell) for cell in lines[at].strip("|").split("|")[1:]]
    cells = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        failed, *codes = (int(cell) for cell in line.strip("|").split("|"))
        cells += [(failed, rate, code) for rate, code in zip(rates, codes, strict=True)]
    return cells


def test_the_table_covers_all_cases() -> None:
    assert len(table()) == 20
    assert {code for _, _, code in table()} == {0, 65}


@pytest.mark.parametrize("failed", sorted({row[0] for row in table()}))
def test_failed_rows_and_the_exit_code(tmp_path: Path, failed: int) -> None:
    """The job runs once; the same command with another rate then judges what is there. All in this process: that the
    supervisor hands on its worker's exit code is the next test's."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join('{"prompt": null}\n' if i < failed else '{"prompt": "a"}\n' for i in range(100)))
    for number, rate, code in table():
        if number == failed:
            job = ["run", "--engine", "fake", "--input", str(source), "--output", str(tmp_path / "out")]
            done = CliRunner().invoke(main, [*job, "--prompt", "prompt", "--max-error-rate", rate, "--no-supervisor"])
            assert done.exit_code == code, done.output
            assert ("above --max-error-rate" in done.stderr) == (code == 65)
            assert "100 of 100 rows" in done.stderr


def test_a_damaged_input_is_65_whatever_the_rate(
    run_cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    import gzip
    import json

    packed = gzip.compress("".join(json.dumps({"prompt": f"row {i * 7919}"}) + "\n" for i in range(2000)).encode())
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(packed[: len(packed) // 2])
    done = run_cli(
        "run", "--engine", "fake", "--input", source, "--output", tmp_path / "out", "--max-error-rate", "1", code=65
    )
    assert "an input file is damaged" in done.stderr
