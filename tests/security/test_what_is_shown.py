"""Terminals and logs: text from rows, columns and files cannot steer a terminal, and secrets stay out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchjob.report import console
from batchjob.report.redact import redact, redact_values

ESCAPES = "\x1b[31mred\x1b[0m \x1b]8;;http://evil\x07link\x1b]8;;\x07 \rover\x08\x9b2J \u202egnp"


def unsafe(text: str) -> list[str]:
    return [char for char in text if not char.isprintable() and char != "\n"]


def test_control_characters_are_written_out() -> None:
    safe = console.safe(f"first\n{ESCAPES}\nlast → é 漢")
    assert unsafe(safe) == []
    assert safe.startswith("first\n\\x1b[31mred")
    assert safe.endswith("\nlast → é 漢")


def test_nothing_in_an_input_reaches_the_terminal_raw(
    run_cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Values, ids, column names, broken lines and the name of the file itself."""
    folder = tmp_path / "in\x1b[2J"
    folder.mkdir()
    source = folder / "rows\x07.jsonl"
    rows = [{"prompt": ESCAPES, f"col{ESCAPES}": ESCAPES, "id": ESCAPES}, {"prompt": None, "id": ESCAPES}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + f"not json {ESCAPES}\n")
    output = tmp_path / "out"
    common = ["--engine", "fake", "--input", source]
    for arguments, code in (
        (["run", *common, "--output", output, "--max-error-rate", "1"], 0),
        (["run", *common, "--output", tmp_path / "none", "--prompt", "{missing}"], 65),
        (["run", *common, "--output", tmp_path / "none", "--keep-columns", "missing"], 65),
        (["validate", *common], None),
        (["status", output], 0),
        (["merge", output, tmp_path / "merged.jsonl"], 0),
        (["merge", output, tmp_path / "merged.jsonl"], 73),
    ):
        done = run_cli(*arguments, code=code)
        assert unsafe(done.stderr) == [], arguments
        assert unsafe(done.stdout) == [], arguments


def test_a_canary_in_the_environment_is_nowhere_in_the_output(
    run_cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    canary = "canary-5f1c9a"
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    secrets = {"HF_TOKEN": canary, "MY_API_KEY": f"{canary}-2", "DB_PASSWORD": f"{canary}-3"}
    common = ["--engine", "fake", "--input", source, "--output", tmp_path / "out"]
    done = run_cli("run", *common, "--model", f"https://user:{canary}@hub/model", env=secrets)
    again = run_cli("run", *common, "--model", f"https://user:{canary}@hub/model", "--seed", "5", env=secrets, code=78)
    wrong = run_cli(
        "run",
        *common,
        "--revision",
        canary,
        "--model",
        f"/none/{canary}-2",
        "--engine",
        "transformers",
        env=secrets,
        code=None,
    )
    for printed in (done, again, wrong):
        assert canary not in printed.stdout + printed.stderr
    for path in (tmp_path / "out").rglob("*"):
        assert canary not in str(path)
        if path.is_file():
            assert canary.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("text", "environment", "shown"),
    [
        ("see abcdefgh1 there", {"HF_TOKEN": "abcdefgh1"}, "see *** there"),
        ("see abcdefgh1 there", {"AWS_SECRET_ACCESS_KEY": "abcdefgh1"}, "see *** there"),
        ("a short one", {"MY_TOKEN": "one"}, "a short one"),
        ("see abcdefgh1", {"EDITOR": "abcdefgh1"}, "see abcdefgh1"),
        ("key hf_" + "aB3" * 11 + ".", {}, "key ***."),
        ("https://me:secret@host/x", {}, "https://***@host/x"),
        ("https://host/x:y@z", {}, "https://host/x:y@z"),
        ("long abcdefgh12", {"A_TOKEN": "abcdefgh1", "B_TOKEN": "abcdefgh12"}, "long ***"),
    ],
)
def test_what_counts_as_a_secret(text: str, environment: dict[str, str], shown: str) -> None:
    assert redact(text, environment) == shown


def test_values_of_any_shape_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X_TOKEN", "abcdefgh1")
    value: Any = {"a": ["abcdefgh1", 1, None, ("x abcdefgh1",)], "b": True}
    assert redact_values(value) == {"a": ["***", 1, None, ["x ***"]], "b": True}


def test_files_are_made_with_the_users_mask(tmp_path: Path) -> None:
    program = (
        "import os, batchjob; os.umask(0o077); "
        "batchjob.run(batchjob.JobSpec(engine='fake', input=('in.jsonl',), output='out', progress='none'))"
    )
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]:
        assert os.stat(path).st_mode & 0o077 == 0, path
