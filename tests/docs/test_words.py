"""Sentences have a subject that a reader can look up: no "whoever", no "somebody" in code, docs and messages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VAGUE = re.compile(r"\b(whoever|whomever|whom|somebody|nobody|everybody)\b", re.IGNORECASE)


def test_no_vague_person_does_anything() -> None:
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "jobs").iterdir(),
        ROOT / "kernels" / "README.md",
    ]
    sources = [path for room in ("batchjob", "kernels") for path in (ROOT / room).rglob("*.py")]
    assert len(sources) > 150
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*pages, *sources)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if VAGUE.search(line)
    ]
    assert found == []
