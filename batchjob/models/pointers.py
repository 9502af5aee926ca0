"""Git LFS pointers, which a clone has in the place of large files until those are fetched."""

from __future__ import annotations

from pathlib import Path

from batchjob.errors import UnsupportedModelError

_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raises UnsupportedModelError if the file is a pointer. An unreadable file is ignored: its reader reports it."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:
        return
    if is_pointer:
        raise UnsupportedModelError(
            f"{path} is a Git LFS pointer, not the file that it stands for: run `git lfs pull` in {path.parent}"
        )
