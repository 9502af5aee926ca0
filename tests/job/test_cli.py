"""The command line: job files and flags, exit codes, what is printed for a person and for a program."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchjob.cli import main
from batchjob.spec import JobSpec, flag, spec_fields

Write = Callable[[Path, Iterable[Any]], Path]


def cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def source(tmp_path: Path, write_jsonl: Write) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(20)])


def test_every_setting_has_a_flag_with_help() -> None:
    text = cli("run", "--help").output
    for field in spec_fields():
        assert flag(field.name) in text
        assert field.metadata["help"].split()[0] in text


def test_a_job_file_with_flags_on_top(tmp_path: Path, source: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'engine = "fake"\ninput = "{source}"\noutput = "{tmp_path / "out"}"\nmax-tokens = 3\nlimit = 10\nchat = true\n'
    )
    result = cli("run", job, "--limit", "5", "--no-chat", "--progress", "none")
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "out" / ".batchjob" / "job.json").read_text())
    assert (manifest["spec"]["limit"], manifest["spec"]["max_tokens"], manifest["spec"]["chat"]) == (5, 3, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_tokns = 3", "unknown setting 'max_tokns'"),
        ("max_tokens = 'many'", "max_tokens must be a whole number"),
        ("temperature = -1", "temperature must be at least 0"),
        ("num_shards = 2.5", "num_shards must be of type int"),
        ("order = 'best'", "--order must be one of"),
        ("top_p = [", "cannot be read"),
    ],
)
def test_a_wrong_job_file_is_exit_2_and_says_what(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    result = cli("run", tmp_path / "job.toml")
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run",), 2),
        (("run", "--input", "x.jsonl"), 2),
        (("run", "--input", "missing.jsonl", "--output", "out", "--engine", "fake"), 66),
        (("run", "--no-such-flag"), 2),
        (("status", "nowhere"), 2),
        (("merge", "nowhere", "x.jsonl"), 2),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output


def test_an_interrupt_before_the_job_can_stop_by_itself_is_no_bug(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("batchjob.job.run.run", interrupted)
    result = cli("run", "--engine", "fake", "--input", source, "--output", tmp_path / "out", "--no-supervisor")
    assert result.exit_code == 75
    assert "run the same command again" in result.output


def test_a_url_is_never_made_into_a_local_directory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, fake = "s3://bucket/out", ("--engine", "fake", "--input", source)
    for arguments in (
        ("run", *fake, "--output", url),
        ("validate", *fake, "--output", url),
        ("slurm", *fake, "--output", url, "--array", "2"),
        ("slurm", *fake, "--output", "out", "--array", "2", "--merge", f"{url}.parquet"),
        ("slurm", *fake, "--output", "out", "--array", "2", "--directory", url),
        ("status", url),
        ("merge", url, "all.jsonl"),
    ):
        result = cli(*arguments)
        assert (result.exit_code, "only local paths" in result.output) == (2, True), (arguments, result.output)
    assert list(tmp_path.iterdir()) == [source]


def test_a_terminal_without_the_characters_of_a_path_ends_nothing(
    tmp_path: Path, write_jsonl: Write, run_cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    source = write_jsonl(tmp_path / "頭.jsonl", [{"prompt": "頭 row"}])
    latin = {"PYTHONIOENCODING": "latin-1"}
    job = ("--engine", "fake", "--max-tokens", "2", "--input", source)
    assert "\\u982d" in run_cli("validate", *job, env=latin).stdout
    run_cli("run", *job, "--output", tmp_path / "出", "--progress", "none", "--no-supervisor", env=latin)
    run_cli("status", tmp_path / "出", env=latin)
    assert "1 rows merged" in run_cli("merge", tmp_path / "出", tmp_path / "頭.out.jsonl", env=latin).stdout


def test_an_output_that_cannot_be_made_is_exit_73(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = cli("run", "--engine", "fake", "--input", source, "--output", tmp_path / "file" / "out")
    assert result.exit_code == 73, result.output


def test_status_and_merge_of_an_unfinished_job(source: Path, tmp_path: Path) -> None:
    half = (
        "--engine",
        "fake",
        "--input",
        source,
        "--output",
        tmp_path / "out",
        "--chunk-rows",
        "5",
        "--num-shards",
        "2",
    )
    assert cli("run", *half, "--progress", "none").exit_code == 0
    status = cli("status", tmp_path / "out", "--json")
    assert status.exit_code == 75
    state = json.loads(status.output)
    assert (state["complete"], state["rows"], state["rows_committed"], state["output_ok"]) == (False, 20, 10, 10)
    assert "not complete: 10 of 20 rows" in cli("status", tmp_path / "out").output
    assert cli("merge", tmp_path / "out", tmp_path / "all.jsonl").exit_code == 75
    assert cli("merge", tmp_path / "out", tmp_path / "some.jsonl", "--partial").exit_code == 0
    assert cli("run", *half, "--shard-id", "1", "--progress", "none").exit_code == 0
    assert cli("status", tmp_path / "out").exit_code == 0
    assert "20 rows merged" in cli("merge", tmp_path / "out", tmp_path / "all.jsonl").output
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["row_index"] for row in rows] == list(range(20))


def test_validate_prints_a_report_and_makes_nothing(source: Path, tmp_path: Path) -> None:
    result = cli("validate", "--engine", "fake", "--input", source)
    assert result.exit_code == 0, result.output
    assert "20" in result.output
    assert json.loads(cli("validate", "--engine", "fake", "--input", source, "--json").output)["num_rows"] == 20
    assert list(tmp_path.iterdir()) == [source]


def test_the_summary_says_where_the_rows_are_and_how_to_read_them(
    source: Path, tmp_path: Path, run_cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_cli("run", "--engine", "fake", "--input", source, "--output", tmp_path / "out")
    assert done.stdout == ""
    assert f"{tmp_path / 'out'}/data" in done.stderr
    assert "batchjob merge" in done.stderr
    again = run_cli("run", "--engine", "fake", "--input", source, "--output", tmp_path / "out")
    assert "nothing to do: 20 of 20 rows" in again.stderr


def test_logit_bias_is_read_from_a_flag(source: Path, tmp_path: Path) -> None:
    flags = ("--engine", "fake", "--input", source, "--output", tmp_path / "out", "--progress", "none")
    assert cli("run", *flags, "--logit-bias", "7=-1.5", "--logit-bias", "9=2").exit_code == 0
    manifest = json.loads((tmp_path / "out" / ".batchjob" / "job.json").read_text())
    assert manifest["resolved"]["sampling"]["logit_bias"] == [[7, -1.5], [9, 2.0]]
    assert cli("run", *flags, "--logit-bias", "7").exit_code == 2


def test_the_specs_of_a_resume_are_the_specs_of_the_python_call(source: Path, tmp_path: Path) -> None:
    import batchjob

    spec = JobSpec(engine="fake", input=(str(source),), output=str(tmp_path / "out"), max_tokens=4, progress="none")
    batchjob.run(spec, echo=lambda line: None)
    flags = ("--engine", "fake", "--input", source, "--output", tmp_path / "out", "--max-tokens", "4")
    assert cli("run", *flags).exit_code == 0


def test_validate_refuses_a_checkpoint_that_is_not_the_model(source: Path, tmp_path: Path, tiny_llama: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    result = cli("validate", "--model", broken, "--raw", "--input", source)
    assert (result.exit_code, "lm_head.weight" in result.output) == (70, True), result.output
