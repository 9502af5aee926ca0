"""Format and compression of a file by its content; by its name where the content does not tell.

What batchjob does not read is refused here by its own name, before it can become a file of broken lines.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from batchjob.errors import InputDataError, InputMissingError
from batchjob.inputs.formats.base import Format, FoundFile
from batchjob.inputs.formats.table import DEFAULT, FORMATS
from batchjob.inputs.names import base_name
from batchjob.inputs.streams import DamagedError, open_bytes
from batchjob.inputs.walk import check_regular

_HEAD = 512  # bytes looked at: a tar archive says so at 257
_READ = "batchjob reads JSON Lines (UTF-8; plain, .gz, .zst, .xz or .bz2) and Parquet"
_PACKED = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2"}
_REFUSED = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive",
    b"\x04\x22\x4d\x18": "lz4 data",
    b"\x02\x21\x4c\x18": "lz4 data",
    **{bytes([number]) + b"\x2a\x4d\x18": "lz4 data" for number in range(0x50, 0x60)},
    b"\xff\x06\x00\x00sNaPpY": "snappy data",
    b"LZIP": "lzip data",
    b"\x1f\x9d": "data of compress (.Z)",
    b"\x5d\x00\x00": "lzma data of the old kind (.lzma)",
    **{bytes([number]) + b"\xb5\x2f\xfd": "zstd data of a version before 0.8" for number in (0x1E, *range(0x22, 0x28))},
    b"PARE": "an encrypted Parquet file",
    b"ARROW1": "an Arrow file",
    b"FEA1": "a Feather file",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"SQLite format 3\x00": "an SQLite database",
    b"\x89HDF": "an HDF5 file",
    b"%PDF": "a PDF",
    b"\xff\xfe\x00\x00": "UTF-32 text",
    b"\x00\x00\xfe\xff": "UTF-32 text",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"<?xml": "XML",
}
_NAMES_REFUSED = (".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xlsx", ".tar")
_LFS = b"version https://git-lfs.github.com/spec/"
_ANNEX = b"/annex/objects/"


def detect(path: str) -> FoundFile:
    """Raises InputMissingError (cannot be read) and InputDataError (no file, or not a format that is read)."""
    size = check_regular(path).st_size
    try:
        head = _read(path, 0, _HEAD)
        compression = _compression(path, head)
    except OSError as error:
        raise InputMissingError(f"cannot read {path}: {error.strerror or error}") from error
    if not size and head:
        raise InputDataError(
            f"{path} holds more than its size says, as files of /proc do; copy it to a real file first"
        )
    if (format := _by_content(head)) is not None:
        return FoundFile(path, format.name, "")
    base = base_name(path)
    _refuse_pointer(path, head)
    format = next((format for format in FORMATS.values() if base.endswith(format.endings)), None)
    if format is not None and format.magic:
        hint = "it is compressed as a whole; unpack it" if compression else "corrupt?"
        raise InputDataError(f"{path} is not a {format.title} file ({hint})")
    if compression:
        _refuse_inside(path, compression)
        return FoundFile(path, (format or DEFAULT).name, compression)
    _refuse(path, "", head)
    if format is None and base.endswith(_NAMES_REFUSED):
        raise InputDataError(f"{path}: {Path(base).suffix} files are not read; convert to JSONL or Parquet")
    return FoundFile(path, (format or DEFAULT).name, "")


def _by_content(head: bytes) -> Format | None:
    return next((format for format in FORMATS.values() if format.magic and head.startswith(format.magic)), None)


def _read(path: str, offset: int, size: int) -> bytes:
    with closing(open_bytes(path, "", offset)) as source:
        return source.read(size)


def _compression(path: str, head: bytes) -> str:
    """By the first bytes. zstd may begin with frames to be skipped, as pzstd writes them; lz4 may too."""
    at = 0
    while len(head) >= 8 and head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:
        at += 8 + int.from_bytes(head[4:8], "little")
        head = _read(path, at, 8)
        if not head:
            return "zst"  # nothing but such frames
    return next((name for magic, name in _PACKED.items() if head.startswith(magic)), "")


def _refuse_pointer(path: str, head: bytes) -> None:
    if head.startswith(_LFS):
        raise InputDataError(
            f"{path} is a Git LFS pointer, not the data it stands for: run `git lfs pull` in its repository"
        )
    if head.startswith(_ANNEX):
        raise InputDataError(f"{path} is a git-annex pointer, not the data it stands for: run `git annex get`")


def _refuse(path: str, inside: str, head: bytes) -> None:
    """Raises InputDataError where the (unpacked) bytes are no JSON Lines."""
    what = next((name for magic, name in _REFUSED.items() if head.startswith(magic)), "")
    if not what and head[257:262] == b"ustar":
        what = "a tar archive"
    if not what and head.lstrip()[:14].lower().startswith((b"<!doctype", b"<html")):
        what = "a web page: the download of a file may have failed"
    if not what and b"\0" in head[:4]:
        what = "UTF-16 or UTF-32 text" if head.strip(b"\0") and head[:4].count(b"\0") > 1 else "binary data"
        what = what if head.strip(b"\0") else "a file of zeros"
    if what:
        raise InputDataError(f"{path} {'is' if not inside else f'({inside}) holds'} {what}; {_READ}")


def _refuse_inside(path: str, compression: str) -> None:
    try:
        with closing(open_bytes(path, compression)) as source:
            head = source.read(_HEAD)[:_HEAD]
    except (DamagedError, OSError):
        return  # the scan of the rows meets it again, and says where
    if (format := _by_content(head)) is not None:
        raise InputDataError(f"{path} is a {format.title} file that is compressed as a whole; unpack it")
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            raise InputDataError(f"{path} is compressed twice ({compression}, then {name}); unpack it")
    _refuse_pointer(path, head)
    _refuse(path, compression, head)
