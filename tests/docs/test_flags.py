"""Every flag that a message, a docstring or a page names is one that a program takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchjob.cli import main

ROOT = Path(__file__).resolve().parents[2]
FLAG = re.compile(r"(?<![\w/-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
SOURCES = [path for folder in ("batchjob", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_OTHER_PROGRAMS = {
    "sbatch": {"dependency", "gpus", "job-name", "no-requeue", "open-mode", "parsable", "signal"},
    "squeue": {"jobs", "noheader"},
    "scontrol": {"oneliner"},
    "findmnt": {"target"},
    "pip": {"no-deps"},
    "pytest": {"collect-only", "confcutdir", "import-mode", "rootdir", "tb"},
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and text of every line of a page, or of every string of a program, parts of f-strings included."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(source.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def flags_of_commands() -> set[str]:
    parameters = [parameter for command in (main, *main.commands.values()) for parameter in command.params]
    return {"--help"}.union(*((*parameter.opts, *parameter.secondary_opts) for parameter in parameters))


def flags_of_scripts() -> set[str]:
    """The arguments that the benchmarks and the kernel compiler declare with argparse."""
    calls = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {
        argument.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def named_flags(paths: list[Path]) -> dict[str, str]:
    """Flag -> the first place that names it."""
    found: dict[str, str] = {}
    for path in paths:
        for line, text in texts(path):
            for flag in FLAG.findall(text):
                found.setdefault(flag, f"{path.relative_to(ROOT)}:{line}")
    return found


@pytest.mark.parametrize("paths", [SOURCES, PAGES], ids=["sources", "pages"])
def test_every_named_flag_exists(paths: list[Path]) -> None:
    others = {f"--{name}" for names in OF_OTHER_PROGRAMS.values() for name in names}
    known = flags_of_commands() | flags_of_scripts() | others
    assert {flag: place for flag, place in named_flags(paths).items() if flag not in known} == {}


def test_no_allowed_flag_of_another_program_is_unused() -> None:
    named = named_flags([*SOURCES, *PAGES])
    assert [name for names in OF_OTHER_PROGRAMS.values() for name in names if f"--{name}" not in named] == []


def test_a_flag_that_does_not_exist_is_found(tmp_path: Path) -> None:
    program = tmp_path / "message.py"
    program.write_text('f"give --input, or {2} --no-such-flag=1"')
    assert [FLAG.findall(text) for _, text in texts(program)] == [["--input"], ["--no-such-flag"]]
    assert "--no-such-flag" not in flags_of_commands()
