"""docs/architecture.md is held to the tree: every path in it exists, every folder is on it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "batchjob"
TOPS = ("kernels", "tests", "docs", "jobs", "data")


def named_paths() -> list[str]:
    """Everything in backticks that is written as a path: with a slash or a Python file's ending."""
    return [name for name in re.findall(r"`([^`\s]+)`", TEXT) if "/" in name or name.endswith(".py")]


def exists(name: str) -> bool:
    path = (ROOT if name.split("/")[0] in TOPS else PACKAGE) / name
    return path.is_dir() if name.endswith("/") else path.is_file()


def test_the_page_is_short() -> None:
    assert len(TEXT.splitlines()) <= 100


def test_every_path_exists() -> None:
    names = named_paths()
    assert len(names) > 40
    assert [name for name in names if not exists(name)] == []


def test_every_folder_is_named() -> None:
    folders = {
        f"{init.parent.relative_to(PACKAGE)}/" for init in PACKAGE.rglob("__init__.py") if init.parent != PACKAGE
    }
    assert folders - set(named_paths()) == set()


def test_every_file_at_the_top_is_named() -> None:
    files = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert files - set(named_paths()) == set()
