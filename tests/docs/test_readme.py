"""The README says what the code does: its commands run, its tables are the code's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchjob import errors
from batchjob.records import ROW_ERROR_TYPES
from batchjob.sampling import PARAM_NAMES
from batchjob.spec import flag, spec_fields

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^<!-- run -->\n```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first header cell is `heading`."""
    lines = README.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that looks like a checkout to the commands, and where they may write."""
    path = tmp_path_factory.mktemp("readme")
    for name in ("data", "jobs"):
        (path / name).symlink_to(ROOT / name)
    return path


BLOCKS = BLOCK.findall(README)


def test_there_are_commands_to_run() -> None:
    assert [language for language, _ in BLOCKS].count("bash") >= 2
    assert [language for language, _ in BLOCKS].count("python") >= 1
    assert README.count("<!-- run -->") == len(BLOCKS)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_commands_run(workplace: Path, number: int) -> None:
    """As written, but for the model, which a test cannot fetch: the fake engine takes its place."""
    language, text = BLOCKS[number]
    text = text.replace(f"--model {HUB_MODEL}", "--engine fake").replace(f'model="{HUB_MODEL}"', 'engine="fake"')
    command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=workplace,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_error_types_are_the_closed_list() -> None:
    assert {row[0].strip("`"): row[1] for row in table("error_type")} == dict(ROW_ERROR_TYPES)


def test_the_exit_codes_are_those_of_the_errors() -> None:
    codes = {
        value.exit_code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.BatchJobError)
    }
    assert [int(row[0]) for row in table("code")] == sorted({0} | codes)


def test_the_output_columns_are_those_of_the_schema() -> None:
    from batchjob.store.columns import COLUMNS, NUM_PLACE_COLUMNS

    documented = [(row[0].strip("`"), row[1]) for row in table("column")]
    names = [column.name for column in COLUMNS]
    assert [name for name, _ in documented] == [*names[:NUM_PLACE_COLUMNS], "...", *names[NUM_PLACE_COLUMNS:]]
    types = {"int64": "int64", "int32": "int32", "string": "string", "list of int32": "list<item: int32>"}
    for column in COLUMNS:
        assert types[dict(documented)[column.name]] == str(column.kind.type).replace("element:", "item:"), column.name


def test_every_sampling_setting_is_documented() -> None:
    named = {name for row in table("setting") for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(PARAM_NAMES)


def run_help(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "batchjob", *arguments, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def commands() -> list[str]:
    listed = run_help().split("Commands:")[1]
    return re.findall(r"^  (\w[\w-]*)", listed, re.MULTILINE)


def test_every_command_is_documented() -> None:
    documented = [re.match(r"`batchjob (\w+)", row[0]) for row in table("command")]
    assert sorted(match[1] for match in documented if match) == sorted(commands())


@pytest.mark.parametrize("command", ["run", "validate"])
def test_every_field_of_a_job_is_a_flag_with_its_own_help(command: str) -> None:
    text = " ".join(run_help(command).split())
    for field in spec_fields():
        assert flag(field.name) in text, f"{command} --help lacks {flag(field.name)}"
        assert " ".join(field.metadata["help"].split()).split(" [default")[0] in text, field.name


def test_every_flag_that_the_documents_name_exists() -> None:
    known = {flag(field.name) for field in spec_fields()} | {"--help"}
    for command in commands():
        known |= set(re.findall(r"--[a-z][a-z-]+", run_help(command)))
    help_of_gpu_check = subprocess.run(
        [sys.executable, "-m", "batchjob.bench.gpu_check", "--help"], capture_output=True, text=True, check=True
    ).stdout
    known |= set(re.findall(r"--[a-z][a-z-]+", help_of_gpu_check))
    for path in [ROOT / "README.md", *(ROOT / "jobs").glob("*")]:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if "batchjob run" in line or path.name == "README.md"]
        for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines)):
            if name not in known and not (name in SLURM_FLAGS and path.parent.name == "jobs"):
                pytest.fail(f"{path.relative_to(ROOT)} names {name}, which does not exist")


SLURM_FLAGS = {"--array", "--signal", "--requeue", "--dependency", "--open-mode", "--parsable"}


def test_the_size_of_the_error_share_is_the_default() -> None:
    default = next(field.default for field in spec_fields() if field.name == "max_error_rate")
    assert f"`--max-error-rate` ({default:g})" in README
