"""Turns a `.gguf` file into a directory that Transformers loads, once, kept in the user's cache.

The file is hostile until shown otherwise: its header is walked and held against the file's size first
(`gguf_header`), then a child process with a memory and a time limit converts it (`batchjob.engine.model.gguf_convert`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from batchjob.errors import StorageError, UnsupportedModelError
from batchjob.models.gguf_header import check_header

_FORMAT = 2  # raise when the conversion gives other files than before
_SAMPLE_BYTES = 65536
_NUM_SAMPLES = 256
_BASE_MEMORY = 12 * 2**30  # address space of Python with torch, most of it never touched
_MEMORY_PER_BYTE = 32  # 4-bit weights become 32-bit ones, held about three times for a moment


def cache_dir() -> Path:
    """The directory of converted models: $BATCHJOB_CACHE_DIR, else `batchjob` in the user's cache directory."""
    own = os.environ.get("BATCHJOB_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchjob"


def convert_gguf(path: Path) -> Path:
    """The directory of the converted model; it is converted now if it is not in the cache. Safe to call from many
    processes.

    Raises UnsupportedModelError (not a usable GGUF file) or StorageError (the cache cannot be written).
    """
    check_header(path)
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    target = cache_dir() / "gguf" / f"{stem}-{_digest(path)[:16]}-v{_FORMAT}"
    if target.is_dir():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedModelError("reading .gguf files needs another package: pip install 'batchjob[demo]'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(target.name + ".lock")):
            if not target.is_dir():
                _convert(path, target)
    except OSError as error:
        raise StorageError(
            f"the converted model could not be kept in {target.parent}: {error}; "
            "set BATCHJOB_CACHE_DIR to a directory with more room"
        ) from None
    return target


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Spares several processes the same work. Where locks do not work, the rename below still lets one of them win."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(path: Path, target: Path) -> None:
    print(f"Converting {path.name} to float32 safetensors, once, into {target}", file=sys.stderr, flush=True)
    work = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        _run_child(path, work)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same files
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_child(path: Path, work: Path) -> None:
    size = path.stat().st_size
    timeout = 600 + size / 2**20
    memory = _BASE_MEMORY + _MEMORY_PER_BYTE * size
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "batchjob.engine.model.gguf_convert", str(path.resolve()), str(work)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        resource.prlimit(child.pid, resource.RLIMIT_AS, (memory, memory))
        try:
            _, messages = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            raise UnsupportedModelError(f"{path} was not converted within {timeout:.0f} s; is it sound?") from None
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        last = messages.strip().splitlines()[-1:] or [f"the converter ended with status {child.returncode}"]
        raise UnsupportedModelError(f"{path} could not be converted: {last[0]}")


def _digest(path: Path) -> str:
    """SHA-256 of the size and of samples spread over the whole file, header included: fast for any size."""
    size = path.stat().st_size
    step = max(_SAMPLE_BYTES, math.ceil(size / _NUM_SAMPLES))
    state = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        for position in range(0, size, step):
            file.seek(position)
            state.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()
