"""docs/reliability.md names the test of every promise and of every fault. Those tests must exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`((?:\w+/)*test_\w+\.py)(?:::(\w+))?`")
NUM_FAULTS = 44


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def fault_rows() -> list[list[str]]:
    table = PAGE.split("## The fault table")[1]
    lines = [line for line in table.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_named_test_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 60
    for file, function in named:
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert not function or function in functions(path), f"{file} has no {function}"


def test_every_fault_has_a_line_with_a_test_or_a_reason() -> None:
    rows = fault_rows()
    assert [int(row[0]) for row in rows] == list(range(1, NUM_FAULTS + 1))
    for number, _, what, test in rows:
        assert len(what) > 20, number
        assert NAMED.search(test) or "not tested" in test, f"fault {number} names no test and gives no reason"
