"""The examples in jobs/ are sound: job files load, scripts parse and say what they must."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from batchjob.spec import JobSpec, load_toml

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = ROOT / "jobs"


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.toml")), ids=lambda path: path.name)
def test_an_example_job_is_valid_and_its_input_is_there(path: Path) -> None:
    spec = JobSpec(**load_toml(path))
    assert all((ROOT / name).is_file() for name in spec.input)
    assert spec.output is not None
    assert spec.output.startswith("out/"), "examples write where git does not look"


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.toml")), ids=lambda path: path.name)
def test_an_example_job_runs_with_the_fake_engine(path: Path, tmp_path: Path, run_cli, project_root: Path) -> None:
    output = tmp_path / "out"
    run_cli("run", path, "--engine", "fake", "--limit", "16", "--output", output, cwd=project_root)
    status = run_cli("status", output, "--json").stdout
    assert '"complete": true' in status


@pytest.mark.parametrize("path", [*JOBS.glob("*.sbatch"), *JOBS.glob("*.sh")], ids=lambda path: path.name)
def test_a_script_parses(path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", str(path)], check=True)


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.sbatch")), ids=lambda path: path.name)
def test_a_batch_script_keeps_its_log_and_becomes_the_program(path: Path) -> None:
    text = path.read_text()
    assert "#SBATCH --open-mode=append" in text
    assert re.search(r"^exec batchjob ", text, re.MULTILINE), "a child of bash would not get SLURM's signals"


def test_the_array_names_its_number_of_shards_itself() -> None:
    text = (JOBS / "array.sbatch").read_text()
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("# "))
    assert "SLURM_ARRAY_TASK_COUNT" not in code
    last = re.search(r"#SBATCH --array=0-(\d+)", text)
    shards = re.search(r"--num-shards (\d+) --shard-id \"\$SLURM_ARRAY_TASK_ID\"$", text, re.MULTILINE)
    assert last is not None
    assert shards is not None
    assert int(shards[1]) == int(last[1]) + 1


def test_the_nightly_script_checks_and_then_submits(tmp_path: Path) -> None:
    """Run with a stand-in for `batchjob` that writes down how it was called."""
    called = tmp_path / "called"
    stand_in = tmp_path / "bin" / "batchjob"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho batchjob "$@" >> {called}\n')
    stand_in.chmod(0o755)
    subprocess.run(
        ["bash", str(JOBS / "nightly.sh"), "job.toml", "in", "results", "2026-01-31"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        check=True,
    )
    check, array = called.read_text().splitlines()
    assert check == "batchjob validate job.toml --input in/2026-01-31 --output results/2026-01-31.out"
    assert array.startswith("batchjob slurm job.toml --input in/2026-01-31 --output results/2026-01-31.out --array 16 ")
    assert array.endswith("--merge results/2026-01-31.parquet --directory results/2026-01-31.slurm --submit")
    from batchjob.cli import main

    assert main.commands["slurm"].make_context("slurm", array.split()[2:]).params["submit"]  # type: ignore[attr-defined]


def test_the_sample_prompts_are_what_their_note_says(data_dir: Path) -> None:
    note = (data_dir / "README.md").read_text()
    for names, rows, columns in re.findall(r"^\| (`[^|]+`) \| (\d+) \| ([^|]+) \|", note, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            if name.endswith(".parquet"):
                import pyarrow.parquet as pq

                table = pq.read_table(data_dir / name)
            else:
                import pyarrow.json

                table = pyarrow.json.read_json(data_dir / name)
            assert table.num_rows == int(rows), name
            assert table.column_names == re.findall(r"`([^`]+)`", columns), name
    files = {path.name for path in data_dir.iterdir() if path.suffix in (".jsonl", ".parquet")}
    assert files == set(re.findall(r"`([\w.]+\.(?:jsonl|parquet))`", note)), "a data file without a licence note"
