"""Resolves the value of `--model`, a hub id, local directory or `.gguf` file, to a `ModelInfo`."""

from __future__ import annotations

import re
from pathlib import Path

from batchjob.errors import UsageError
from batchjob.models.gguf import convert_gguf
from batchjob.models.hub import download
from batchjob.models.info import ModelInfo, read_model

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(model: str, *, revision: str | None = None) -> ModelInfo:
    """Finds a model, fetches or converts it if need be, and reads its files. Loads no weights.

    `revision` is a branch, tag or commit of a hub model; on resume, give the commit that the job was made with.
    A path that exists on disk comes before a hub id of the same spelling. Raises UsageError (not found),
    UnsupportedModelError (found, but cannot be used) or StoppedEarlyError (the hub did not answer).
    """
    path = Path(model).expanduser()
    local = path.exists()
    if local and revision is not None:
        raise UsageError(f"--revision is for hub models; {model} is a local path")
    if local and path.is_dir():
        return read_model(path, name=model, source="directory")
    if local and path.suffix.lower() == ".gguf":
        return read_model(convert_gguf(path), name=model, source="gguf")
    if local:
        raise UsageError(f"--model {model} is a file; it must be a directory, a .gguf file or a hub id")
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(model):
        raise UsageError(f"--model {model} does not exist")
    directory, commit = download(model, revision=revision)
    return read_model(directory, name=model, source="hub", revision=commit)
