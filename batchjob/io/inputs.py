"""From `--input` patterns to a list of files: globs, directories, formats and compression, and their stamps."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchjob.errors import InputDataError, InputMissingError, StorageError, UsageError
from batchjob.plan import InputFile

_JSONL_NAMES = (".jsonl", ".ndjson")
_PARQUET_NAMES = (".parquet", ".pq")
_COMPRESSED = (".gz", ".zst")
_EDGE = 1 << 16  # bytes hashed at either end of a file
_REFUSED = {
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"ARROW1": "an Arrow file",
}


@dataclass(frozen=True, slots=True)
class FoundFile:
    path: str  # absolute
    format: str  # "jsonl" | "parquet"
    compression: str  # "" | "gz" | "zst"


def find_inputs(patterns: Sequence[str]) -> tuple[list[FoundFile], list[str]]:
    """The files behind files, directories and globs, and warnings. Patterns keep their order, files are sorted by name.

    A directory is searched in depth for .jsonl, .ndjson and .parquet files (with .gz or .zst), and for .json ones where
    there are no others; names that begin with a dot or an underscore are left out. A file that two patterns name counts
    once. Raises InputMissingError (nothing there), InputDataError (not a format we read), UsageError.
    """
    if not patterns:
        raise UsageError("no input given: --input FILE, directory or glob")
    paths: dict[str, None] = {}
    twice: list[str] = []
    for pattern in patterns:
        for path in _expand(pattern):
            if path in paths:
                twice.append(path)
            paths[path] = None
    files = [detect(path) for path in paths]
    formats = {file.format for file in files}
    if len(formats) > 1:
        examples = {file.format: file.path for file in reversed(files)}
        raise InputDataError(
            f"the inputs mix Parquet ({examples['parquet']}) and JSONL ({examples['jsonl']}); run one job for each"
        )
    warnings = [f"{path} is named by two --input patterns and read once" for path in dict.fromkeys(twice)]
    return files, warnings


def _expand(pattern: str) -> list[str]:
    if pattern == "-" or "://" in pattern:
        raise UsageError(f"--input {pattern}: only local files, directories and globs are read")
    path = os.path.abspath(os.path.expanduser(pattern))
    if os.path.isdir(path):
        found = _walk(path)
        if not found:
            raise InputMissingError(f"--input {pattern}: the directory holds no .jsonl, .json or .parquet file")
        return found
    if os.path.exists(path):
        return [path]
    if glob.has_magic(path):
        found = sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match))
        if found:
            return found
        raise InputMissingError(f"--input {pattern}: no file matches")
    raise InputMissingError(f"--input {pattern}: no such file or directory")


def _walk(root: str) -> list[str]:
    found: list[str] = []
    maybe: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] not in "._"]
        for name in names:
            if name[0] in "._":
                continue
            base = _base_name(name)
            if base.endswith(_JSONL_NAMES) or name.endswith(_PARQUET_NAMES):
                found.append(os.path.join(folder, name))
            elif base.endswith(".json"):
                maybe.append(os.path.join(folder, name))
    return sorted(found or maybe)


def _base_name(name: str) -> str:
    name = name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return name


def detect(path: str) -> FoundFile:
    """Format and compression by content, by name where the content does not tell."""
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise InputMissingError(f"cannot read {path}: {error.strerror or error}") from error
    if head.startswith(b"PAR1"):
        return FoundFile(path, "parquet", "")
    base = _base_name(os.path.basename(path))
    if base.endswith(_PARQUET_NAMES):
        hint = "it is compressed as a whole; unpack it" if head[:2] == b"\x1f\x8b" or head[:4] == _ZSTD else "corrupt?"
        raise InputDataError(f"{path} is not a Parquet file ({hint})")
    for magic, what in _REFUSED.items():
        if head.startswith(magic):
            raise InputDataError(f"{path} is {what}; batchjob reads JSONL (UTF-8, plain, .gz, .zst) and Parquet")
    if head[:2] == b"\x1f\x8b":
        return FoundFile(path, "jsonl", "gz")
    if head[:4] == _ZSTD:
        return FoundFile(path, "jsonl", "zst")
    if base.endswith((".csv", ".tsv", ".arrow", ".xlsx", ".tar")):
        raise InputDataError(f"{path}: {Path(base).suffix} files are not read; convert to JSONL or Parquet")
    return FoundFile(path, "jsonl", "")


_ZSTD = b"\x28\xb5\x2f\xfd"


def digest(path: str, how: str) -> str:
    """`how`:hash. "full" hashes every byte, "ends" the first and last 64 KiB, "footer" the end of a Parquet file.

    Each includes the size. Raises StorageError.
    """
    hasher = hashlib.blake2b(digest_size=16)
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            for block in _blocks(file, size, how):
                hasher.update(block)
    except OSError as error:
        raise StorageError(f"reading {path} failed: {error.strerror or error}") from error
    hasher.update(str(size).encode())
    return f"{how}:{hasher.hexdigest()}"


def _blocks(file: object, size: int, how: str) -> Iterator[bytes]:
    import io

    assert isinstance(file, io.BufferedReader)
    if how == "full":
        while block := file.read(1 << 20):
            yield block
        return
    if how == "footer":
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little") + 8
        file.seek(-min(length, size), os.SEEK_END)
        yield file.read()
    else:
        yield file.read(_EDGE)
    file.seek(-min(_EDGE, size), os.SEEK_END)
    yield file.read()


def check_unchanged(file: InputFile) -> str | None:
    """None where the file is as planned; a warning where only its time differs. Raises InputMissingError otherwise."""
    try:
        stat = os.stat(file.path)
    except FileNotFoundError:
        raise InputMissingError(f"input file {file.path} is gone; put it back, or start a new output") from None
    except OSError as error:
        raise StorageError(f"cannot read {file.path}: {error.strerror or error}") from error
    if stat.st_size == file.size and stat.st_mtime_ns == file.mtime_ns:
        return None
    if stat.st_size != file.size:
        raise InputMissingError(
            f"input file {file.path} has changed: {file.size:,} bytes when planned, {stat.st_size:,} now; "
            "put the old file back, or start a new output"
        )
    if digest(file.path, file.digest.partition(":")[0]) != file.digest:
        raise InputMissingError(
            f"input file {file.path} has changed since the job was planned (same size, other content); "
            "put the old file back, or start a new output"
        )
    return f"{file.path} has a new modification time but the same content"
