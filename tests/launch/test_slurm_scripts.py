"""The scripts that `batchjob slurm` writes: what they say, how bash reads them, and how they are submitted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchjob.cli import main
from batchjob.errors import UsageError
from batchjob.launch.slurm_scripts import Scripts, check_options, flag_arguments
from batchjob.spec import load_toml, spec_fields

ROOT = Path(__file__).resolve().parent.parent.parent
Write = Callable[[Path, Iterable[Any]], Path]


def arguments_of(script: str) -> list[str]:
    """The arguments that bash makes of the script's last command, with task 3 of the array."""
    program = script.replace("exec ", "printf '%s\\0' ")
    done = subprocess.run(
        ["bash", "-c", program],
        env={"SLURM_ARRAY_TASK_ID": "3", "PATH": "/bin:/usr/bin"},
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().split("\0")[:-1]


HARD = {
    "prompt": 'It\'s {text}\n"$HOME" `id` \\ %A !',
    "stop": ("\n", "--"),
    "logit_bias": ((5, -1.2345678),),
    "min_tokens": 3,
    "temperature": 0.5,
    "chat": True,
    "prefix_caching": False,
    "input": ("a b.jsonl", "-c.jsonl"),
}


def test_every_setting_reaches_the_task_as_it_was_given(tmp_path: Path) -> None:
    """Through bash and through the command line, back into a job."""
    script = Scripts(output="out", flags={**HARD, "output": "out"}, num_tasks=8, directory=str(tmp_path)).array()
    program, command, *arguments = arguments_of(script)
    assert (program, command) == ("batchjob", "run")
    context = main.commands["run"].make_context("run", arguments)  # type: ignore[attr-defined]
    settings = {field.name for field in spec_fields()}
    given = {name: value for name, value in context.params.items() if name in settings and value not in (None, ())}
    assert given.pop("num_shards") == 8
    assert given.pop("shard_id") == 3
    assert given == {**HARD, "output": "out"}


def test_a_flag_that_turns_something_off_is_kept() -> None:
    assert flag_arguments({"chat": False, "raw": None, "stop": ()}) == ["--no-chat"]


def test_directories_with_blanks_and_percent_signs(tmp_path: Path) -> None:
    where = tmp_path / "a b%j"
    where.mkdir()
    scripts = Scripts(output="o", flags={}, directory=str(where), logs=str(where / "logs"), merge_into="all rows.jsonl")
    for script in (scripts.array(), scripts.merge()):
        log = re.search(r"^#SBATCH --output=(.*)$", script, re.MULTILINE)
        assert log is not None
        assert log[1].startswith(f'"{tmp_path}/a b%%j/logs/%x-')
    program = re.sub(r"exec .*", "pwd", scripts.merge())
    started_in = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert started_in == str(where)
    assert arguments_of(scripts.merge()) == ["batchjob", "merge", "o", "all rows.jsonl"]


@pytest.mark.parametrize("option", ["gpus=1", "--gpus=1\nrm -rf x", "--array=0-3", "-a 5", "--requeue", "--output=x"])
def test_an_option_that_would_break_the_script_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match="--sbatch"):
        check_options([option])


def lines_without_comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if not re.match(r"#(?!SBATCH|!)", line)]


@pytest.mark.parametrize("name", ["array.sbatch", "merge.sbatch"])
def test_the_examples_in_jobs_are_what_it_writes(name: str) -> None:
    scripts = Scripts(
        output="out/labels",
        flags={"requeue": "scontrol"},
        job_file="jobs/classify.toml",
        num_tasks=16,
        max_running=8,
        options=["--partition=gpu", "--time=04:00:00", "--gpus=1", "--cpus-per-task=8", "--mem=32G"],
        merge_options=["--partition=gpu"],
        merge_into="out/labels.parquet",
        logs="slurm/logs",
    )
    written = scripts.array() if name == "array.sbatch" else scripts.merge()
    assert lines_without_comments((ROOT / "jobs" / name).read_text()) == lines_without_comments(written)


# -- the command


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and stand-ins for SLURM's programs that write down their arguments."""
    called = tmp_path / "called"
    config = "KillWait = 5 sec\nMaxArraySize = 4\n"
    bodies = {"sbatch": "wc -l < " + str(called), "scontrol": f"[ $2 = config ] && printf '{config}' || true"}
    for name, body in bodies.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {called}\n{body}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return called


@pytest.fixture
def source(tmp_path: Path, write_jsonl: Write) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(400)])


def slurm(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["slurm", *arguments])
    assert result.exit_code == code, result.output
    return result.output


JOB = ("--engine", "fake", "--input", "in.jsonl", "--output", "out")


@pytest.mark.usefixtures("source")
def test_it_plans_writes_warns_and_says_how_to_submit(tmp_path: Path, site: Path) -> None:
    text = slurm(*JOB, "--array", "5", "--merge", "all.jsonl", "--time", "10", "--sbatch=--mem=1G")
    assert "planned 400 rows" in text
    assert "warning: KillWait is 5 s" in text
    assert "the site allows 4 tasks" in text
    assert "sbatch slurm/array.sbatch" in text
    assert "sbatch --dependency=afterany:ARRAY_JOB_ID slurm/merge.sbatch" in text
    assert (tmp_path / "out" / ".batchjob" / "job.json").is_file(), "no task has to plan"
    assert (tmp_path / "slurm" / "logs").is_dir(), "SLURM does not make it and then loses the log"
    script = (tmp_path / "slurm" / "array.sbatch").read_text()
    assert "#SBATCH --time=10\n#SBATCH --mem=1G\n" in script
    assert arguments_of(script)[:3] == [sys.executable, "-m", "batchjob"]
    assert "--requeue=scontrol" in arguments_of(script)
    assert "sbatch" not in site.read_text()


@pytest.mark.usefixtures("source")
def test_it_submits_the_merge_behind_the_array(site: Path) -> None:
    text = slurm(*JOB, "--array", "4", "--merge", "all.jsonl", "--submit", "--requeue", "none")
    array, merge = [line for line in site.read_text().splitlines() if line.startswith("sbatch")]
    assert array == "sbatch --parsable slurm/array.sbatch"
    array_id = re.search(r"array\.sbatch as job (\d+)", text)
    assert array_id is not None
    assert merge == f"sbatch --parsable --dependency=afterany:{array_id[1]} slurm/merge.sbatch"
    assert "--requeue=none" in Path("slurm/array.sbatch").read_text()


@pytest.mark.usefixtures("source", "site")
def test_a_job_file_is_named_and_not_copied(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('engine = "fake"\ninput = "in.jsonl"\noutput = "out"\nrequeue = "exit"\n')
    slurm("job.toml", "--array", "2", "--max-tokens", "9")
    arguments = arguments_of((tmp_path / "slurm" / "array.sbatch").read_text())
    assert arguments[3:] == ["run", "job.toml", "--max-tokens=9", "--num-shards", "2", "--shard-id", "3"]
    assert load_toml("job.toml")["requeue"] == "exit"


@pytest.mark.usefixtures("source", "site")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shard-id", "1"), "--array gives each task its shard"),
        (("--time", "soon"), "--time must be a time"),
        (("--partition", "a b"), "--partition must be the name"),
        (("--sbatch=--array=1",), "--sbatch must not give --array"),
    ],
)
def test_options_that_make_no_sense(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in slurm(*JOB, "--array", "2", *arguments, code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("site")
def test_a_job_that_cannot_run_fails_before_it_is_submitted(tmp_path: Path) -> None:
    slurm(*JOB, "--array", "2", "--submit", code=66)
    assert not (tmp_path / "slurm").exists()


@pytest.mark.usefixtures("source")
def test_without_slurm_the_scripts_are_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "the site's settings are unknown" in slurm(*JOB, "--array", "2")
    assert "was not submitted" in slurm(*JOB, "--array", "2", "--submit", code=2)


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(("options", "dtype"), [((), "float32"), (("--sbatch=--gpus=1",), "bfloat16")])
def test_the_dtype_is_that_of_the_nodes_not_of_this_machine(
    options: tuple[str, ...], dtype: str, tmp_path: Path, source: Path, tiny_llama: Path
) -> None:
    """The job's dtype is frozen when it is planned, here on a machine without a GPU."""
    if Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_llama.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    text = slurm("--model", str(model), "--input", str(source), "--output", "out", "--array", "2", *options)
    manifest = json.loads((tmp_path / "out" / ".batchjob" / "job.json").read_text())
    assert manifest["resolved"]["dtype"] == dtype
    assert ("no option asks for a GPU" in text) == (dtype == "float32")


@pytest.mark.usefixtures("site")
def test_nothing_is_made_for_a_checkpoint_that_is_not_the_model(tmp_path: Path, source: Path, tiny_llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    text = slurm("--model", str(model), "--input", str(source), "--output", "out", "--array", "2", code=70)
    assert "1 tensor is missing (lm_head.weight)" in text
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "slurm").exists()


@pytest.mark.usefixtures("site", "source")
def test_the_hardware_of_a_deterministic_job_is_that_of_this_machine(tmp_path: Path) -> None:
    text = slurm(*JOB, "--array", "2", "--deterministic")
    manifest = json.loads((tmp_path / "out" / ".batchjob" / "job.json").read_text())
    pinned = manifest["fingerprint"]["deterministic"]["device"]
    assert f"--deterministic pins the hardware, and that of this machine is {pinned}: " in text


# -- compressed input


@pytest.mark.parametrize(("num_shards", "is_warned"), [(1, False), (4, True)])
def test_many_shards_of_one_compressed_file_are_warned_of(
    num_shards: int, is_warned: bool, tmp_path: Path, source: Path, run_cli: Any
) -> None:
    import gzip

    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    flags = ("--engine", "fake", "--output", tmp_path / "out", "--num-shards", str(num_shards))
    printed = run_cli("run", "--input", packed, *flags).stderr
    assert (f"each of the {num_shards} shards that read it decompresses it" in printed) == is_warned
