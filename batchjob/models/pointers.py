"""Git LFS pointers: what a clone has in the place of a large file until that is fetched."""

from __future__ import annotations

from pathlib import Path

from batchjob.errors import UnsupportedModelError

_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raises UnsupportedModelError if the file is a pointer. One that cannot be read is left to whoever needs it."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:
        return
    if is_pointer:
        raise UnsupportedModelError(
            f"{path} is a Git LFS pointer, not the file that it stands for: run `git lfs pull` in {path.parent}"
        )
