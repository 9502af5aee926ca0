"""From `--input` patterns to a list of files, each once, and their stamps."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from stat import S_ISLNK

from batchjob.errors import InputDataError, InputMissingError, StorageError, UsageError
from batchjob.inputs.answers import leave_out_answers
from batchjob.inputs.formats.detect import FoundFile, detect
from batchjob.inputs.walk import expand
from batchjob.plan import InputFile

_EDGE = 1 << 16  # bytes hashed at either end of a file
_NUM_SAMPLES = 256
WHOLE = ("sha256", "full")  # the digests that cover every byte


def find_inputs(patterns: Sequence[str], output: str | None = None) -> tuple[list[FoundFile], list[str]]:
    """The files behind files, directories and globs, and warnings. Patterns keep their order, files are sorted by name.

    A directory is searched in depth for .jsonl, .ndjson and .parquet files (and packed ones), and for .json ones where
    there are no others; names that begin with a dot or an underscore are left out. A file that is named or linked twice
    counts once. What lies in `output`, and answers of other jobs that no pattern names, is left out. Raises
    InputMissingError (nothing there), InputDataError (not a format we read), UsageError.
    """
    if not patterns:
        raise UsageError("no input given: --input FILE, directory or glob")
    known = _Known()
    warnings: list[str] = []
    for pattern in patterns:
        paths, said = expand(pattern)
        kept, left_out = leave_out_answers(pattern, paths, output)
        warnings += [*said, *left_out]
        known.add(kept)
    files = [detect(path) for path in known.paths]
    formats = {file.format for file in files}
    if len(formats) > 1:
        examples = {file.format: file.path for file in reversed(files)}
        raise InputDataError(
            f"the inputs mix Parquet ({examples['parquet']}) and JSONL ({examples['jsonl']}); run one job for each"
        )
    return files, [*warnings, *known.warnings()]


class _Known:
    """Files that have been named, by what they are: of several names of one file the first counts."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._by_place: dict[str | tuple[int, int], str] = {}
        self._folders: dict[str, str] = {}  # as named -> as it is
        self._again: list[str] = []

    def add(self, paths: Sequence[str]) -> None:
        """Those of one pattern, which are then sorted by name."""
        new: dict[str, None] = {}
        for path in paths:
            places = self._places(path)
            known = next((self._by_place[place] for place in places if place in self._by_place), None)
            if known is None:
                self._by_place.update(dict.fromkeys(places, path))
                new[path] = None
            elif known == path:
                self._again.append(f"{path} is named by two --input patterns and read once")
            elif known not in new or len(places) > 1 or os.path.islink(path):  # else its folder is linked twice
                self._again.append(f"{path} is the same file as {known} and read once")
        self.paths += sorted(new)

    def _places(self, path: str) -> list[str | tuple[int, int]]:
        folder, name = os.path.split(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        try:
            stat = os.lstat(path)
            if S_ISLNK(stat.st_mode):
                stat = os.stat(path)
                real = os.path.realpath(path)
            else:
                real = os.path.join(self._folders[folder], name)
        except OSError as error:
            raise InputMissingError(f"cannot read {path}: {error.strerror or error}") from error
        return [real] if stat.st_nlink < 2 else [real, (stat.st_dev, stat.st_ino)]

    def warnings(self) -> list[str]:
        first = list(dict.fromkeys(self._again))
        more = f" (and {len(first) - 1:,} more files like it)" if len(first) > 1 else ""
        return [first[0] + more] if first else []


def digest(path: str, how: str) -> str:
    """`how`:hash. "sha256" hashes every byte, "ends" the first and last 64 KiB, "footer" the end of a Parquet file,
    "samples" that and 256 pieces of 64 KiB all over it; "full" is every byte with BLAKE2b, as earlier versions did.
    SHA-256 is the fastest hash of the standard library where the CPU has instructions for it: 1.2 GB/s here.

    Each includes the size. Raises StorageError.
    """
    hasher = hashlib.sha256() if how == "sha256" else hashlib.blake2b(digest_size=16)
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
    if how in WHOLE:
        while block := file.read(1 << 20):
            yield block
        return
    if how == "samples":
        for i in range(_NUM_SAMPLES):
            file.seek(i * size // _NUM_SAMPLES)
            yield file.read(_EDGE)
    if how in ("footer", "samples"):
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little") + 8
        file.seek(-min(length, size), os.SEEK_END)
        yield file.read()
    else:
        yield file.read(_EDGE)
    file.seek(-min(_EDGE, size), os.SEEK_END)
    yield file.read()


def check_size(file: InputFile) -> os.stat_result:
    """Raises InputMissingError where the file is gone or has another size than planned."""
    try:
        stat = os.stat(file.path)
    except FileNotFoundError:
        raise InputMissingError(f"input file {file.path} is gone; put it back, or start a new output") from None
    except OSError as error:
        raise StorageError(f"cannot read {file.path}: {error.strerror or error}") from error
    if stat.st_size != file.size:
        raise InputMissingError(
            f"input file {file.path} has changed: {file.size:,} bytes when planned, {stat.st_size:,} now; "
            "put the old file back, or start a new output"
        )
    return stat


def check_unchanged(file: InputFile) -> str | None:
    """None where the file is as planned by its time; a warning where only that differs, as far as its digest tells.

    Raises InputMissingError otherwise.
    """
    stat = check_size(file)
    is_touched = stat.st_mtime_ns != file.mtime_ns
    if not is_touched and file.ctime_ns in (0, stat.st_ctime_ns):
        return None
    how = file.digest.partition(":")[0]
    if digest(file.path, how) != file.digest:
        raise InputMissingError(
            f"input file {file.path} has changed since the job was planned (same size, other content); "
            "put the old file back, or start a new output"
        )
    if not is_touched:
        return None
    if how in WHOLE:
        return f"{file.path} has a new modification time but the same content"
    compared = {"footer": "its footer", "samples": "its footer and 256 samples"}.get(how, "its first and last 64 KiB")
    return f"{file.path} has a new modification time; {compared} and its size are the same, nothing else was compared"
