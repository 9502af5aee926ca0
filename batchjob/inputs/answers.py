"""Answers of batchjob jobs among the files of an input: found on the way through a directory, they are no input.

The answers of another job may be the input of this one, where --input names them: OUT/data, a part, or a merged file.
A job's own answers never are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from batchjob.errors import InputMissingError, UsageError

_Key = tuple[int, int]  # tells a directory from others, by whatever path it is reached


def leave_out_answers(pattern: str, paths: Sequence[str], output: str | None) -> tuple[list[str], list[str]]:
    """The paths behind one --input pattern without the answers that it does not name, and warnings.

    `output` is the output directory of the job itself. Links and mounts are seen through. Raises UsageError where the
    pattern names the job's own answers, InputMissingError where nothing but answers is there.
    """
    own = {key for name in ("data", ".batchjob") if output and (key := _key(os.path.join(output, name)))}
    root = _fixed_part(pattern)
    homes: dict[str, tuple[str, bool] | None] = {}  # folder -> the job that it is the output of
    folders: dict[str, str] = {}
    kept: list[str] = []
    left: dict[str, int] = {}  # data directory -> number of files
    for path in paths:
        folder = os.path.dirname(path)
        if os.path.islink(path):
            real = os.path.dirname(os.path.realpath(path))
        else:
            real = folders.get(folder) or folders.setdefault(folder, os.path.realpath(folder))
        if real not in homes:
            homes[real] = _home(real, own)
        home = homes[real]
        if home is None:
            kept.append(path)
            continue
        data, is_own = home
        is_named = _is_below(root, data)
        if is_own and is_named:
            raise UsageError(f"--input {pattern} is the output of this very job; its answers are never its input")
        if is_named:
            kept.append(path)
        else:
            left[data] = left.get(data, 0) + 1
    if left and not kept:
        raise InputMissingError(
            f"--input {pattern}: nothing is there but the answers of a batchjob job; to read them, name their "
            f"directory: --input {next(iter(left))}"
        )
    return kept, [
        f"--input {pattern}: left out {count:,} {'file' if count == 1 else 'files'} in {data}: answers of a batchjob "
        "job" + ("" if (data, True) in homes.values() else "; name that directory as --input to read them")
        for data, count in left.items()
    ]


def _home(folder: str, own: set[_Key]) -> tuple[str, bool] | None:
    """The data or state directory of a job that a folder is in, and whether it is this job's. `folder` is resolved."""
    while True:
        if own and _key(folder) in own:
            return folder, True
        parent, name = os.path.split(folder)
        if name == "data" and os.path.isfile(os.path.join(parent, ".batchjob", "job.json")):
            return folder, False
        if parent == folder:
            return None
        folder = parent


def _fixed_part(pattern: str) -> str:
    """The file or directory that a pattern names, or the one before its first wildcard."""
    path = os.path.abspath(os.path.expanduser(pattern))
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.path.realpath(path)


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _key(path: str) -> _Key | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
