"""Notes: what is planted under their names is neither followed nor waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchjob.notes import read_note, write_note


def test_a_note_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "requeues" / "70_3"
    write_note(path, "1")
    write_note(path, "2")
    assert read_note(path) == "2"
    assert os.listdir(path.parent) == ["70_3"]


def test_a_link_under_a_notes_name_is_not_followed(tmp_path: Path) -> None:
    victim, notes = tmp_path / "victim", tmp_path / "notes"
    victim.write_text("precious")
    notes.mkdir()
    for name in ("a.stacks", f"a.stacks.{os.getpid()}"):
        (notes / name).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        read_note(notes / "a.stacks")
    write_note(notes / "a.stacks", "frames")
    assert victim.read_text() == "precious"
    assert not (notes / "a.stacks").is_symlink()


@pytest.mark.parametrize("linked", ["state", "state/notes"])
def test_a_linked_directory_takes_no_note(tmp_path: Path, linked: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "notes").mkdir(parents=True)
    if linked == "state":
        (tmp_path / "state").symlink_to(elsewhere)
    else:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "notes").symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"[Nn]ot a directory|symbolic"):
        write_note(tmp_path / "state" / "notes" / "a", "text")
    assert not list(elsewhere.rglob("a*"))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "notes" / "70_3"
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(OSError, match="no regular file"):
        read_note(path)
    write_note(path, "1")
    assert read_note(path) == "1"
