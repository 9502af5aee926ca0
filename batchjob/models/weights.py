"""Weight files: only safetensors, their headers checked against the files before anything is loaded, and a digest.

A safetensors file is 8 bytes (length of the header, little endian), the header (a JSON object: tensor name -> dtype,
shape, begin and end offset in the data), then the data. Source: the format's own description, safetensors 0.6.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchjob.errors import UnsupportedModelError
from batchjob.models.pointers import refuse_pointer

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 2**20  # the official parser's own limit
_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"), 1),
}
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_SAMPLE_BYTES = 4096
_MAX_SAMPLES = 4096  # bounds the time on a network file system to seconds


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place, type and shape of one tensor of a model. `dtype` is in safetensors' spelling."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    files: tuple[str, ...]
    stamp: str  # of the files: another one is expected when their bytes have changed
    digest: str
    main_dtype: str  # dtype that holds most bytes, in safetensors' spelling


def locate_tensors(directory: Path, *, name: str) -> dict[str, TensorPlace]:
    """The tensors of a model by name: those that are loaded and that the digest of its weights covers.

    Raises UnsupportedModelError for damaged or missing files, for an index that does not tell the truth about its
    files, and for a tensor that two files hold.
    """
    places: dict[str, TensorPlace] = {}
    for file_name in _weight_files(directory, name):
        header, data_start = _read_header(directory / file_name)
        _check_tensors(directory / file_name, header, data_start)
        _add_places(places, file_name, header, name)
    _check_index(directory, places, name)
    return places


def read_weights(directory: Path, *, name: str) -> Weights:
    """Checks all weight files of a model. Raises UnsupportedModelError.

    The digest covers every header and, of each tensor, 4 KiB at its start, middle and end (fewer places in a model
    with very many tensors): enough to tell two trainings of one model apart without reading hundreds of gigabytes.
    """
    state = hashlib.sha256()
    sizes: Counter[str] = Counter()
    names = _weight_files(directory, name)
    stamp = weights_stamp(directory, names)
    headers = []
    places: dict[str, TensorPlace] = {}
    for file_name in names:
        header, data_start = _read_header(directory / file_name)
        tensors = _check_tensors(directory / file_name, header, data_start)
        _add_places(places, file_name, header, name)
        state.update(f"{file_name}\n{json.dumps(header, sort_keys=True)}\n".encode())
        for dtype, begin, end in tensors:
            sizes[dtype] += end - begin
        headers.append((directory / file_name, data_start, tensors))
    _check_index(directory, places, name)
    num_places = sum(len(_places(begin, end)) for *_, tensors in headers for _, begin, end in tensors)
    stride = math.ceil(num_places / _MAX_SAMPLES) or 1
    seen = 0
    for path, data_start, tensors in headers:
        with path.open("rb") as file:
            for _, begin, end in tensors:
                for place in _places(begin, end):
                    if seen % stride == 0:
                        file.seek(data_start + place)
                        state.update(file.read(min(_SAMPLE_BYTES, end - place)))
                    seen += 1
    main_dtype = sizes.most_common(1)[0][0] if sizes else "F32"
    return Weights(tuple(names), stamp, state.hexdigest(), main_dtype)


def weights_stamp(directory: Path, names: Iterable[str]) -> str:
    """Sizes, times and places on disk of the weight files, links followed. Raises UnsupportedModelError.

    A program may set the time of a change back, but not that of the file's entry.
    """
    try:
        stats = [(directory / name).stat() for name in names]
    except OSError as error:
        raise UnsupportedModelError(f"{error.filename} cannot be read: {error.strerror}") from None
    return " ".join(f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}" for s in stats)


def _add_places(places: dict[str, TensorPlace], file_name: str, header: dict[str, Any], name: str) -> None:
    for tensor, entry in header.items():
        if tensor == "__metadata__":
            continue
        if tensor in places:
            raise UnsupportedModelError(
                f"{name}: the tensor {tensor} is both in {places[tensor].file} and in {file_name}; take one of them out"
            )
        places[tensor] = TensorPlace(file_name, entry["dtype"], tuple(entry["shape"]))


def _check_index(directory: Path, places: Mapping[str, TensorPlace], name: str) -> None:
    """Raises UnsupportedModelError where the index by which the files were found has a tensor in the wrong file."""
    if (directory / _SINGLE).is_file() or not (directory / _INDEX).is_file():
        return
    index = _read_index(directory / _INDEX)
    for tensor, file_name in index.items():
        if tensor not in places or places[tensor].file != file_name:
            where = f"it is in {places[tensor].file}" if tensor in places else "no file has it"
            raise UnsupportedModelError(
                f"{name}: {_INDEX} says that the tensor {tensor} is in {file_name}, but {where}; "
                "fetch or save the model again"
            )


def unused_weights(directory: Path) -> str | None:
    """Weight files that are not loaded although an index names them, as a warning, or None."""
    if not (directory / _SINGLE).is_file() or not (directory / _INDEX).is_file():
        return None
    others = sorted(set(_read_index(directory / _INDEX).values()) - {_SINGLE})
    if not others:
        return None
    return f"{directory} has {_SINGLE} and an index of {others[0]}: {_SINGLE} is used, as Transformers does"


def _weight_files(directory: Path, name: str) -> list[str]:
    """A single file comes before an index, as it does for Transformers."""
    if (directory / _SINGLE).is_file():
        return [_SINGLE]
    if (directory / _INDEX).is_file():
        names = _indexed_files(directory / _INDEX)
        missing = [file_name for file_name in names if not (directory / file_name).is_file()]
        if missing:
            raise UnsupportedModelError(
                f"{name}: {_INDEX} names {missing[0]}, which is not there ({len(missing)} of {len(names)} files are "
                "missing); was the download interrupted?"
            )
        return names
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLED)
    found = f": it has {', '.join(pickled[:3])}, and loading such files can run code" if pickled else ""
    raise UnsupportedModelError(
        f"{name} has no safetensors weights ({_SINGLE} or {_INDEX}){found}. "
        "Use a model or revision with .safetensors files, or convert it once with Transformers' save_pretrained"
    )


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        content = json.loads(path.read_bytes())
        return dict(content["weight_map"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from None


def _indexed_files(path: Path) -> list[str]:
    try:
        names = sorted(set(_read_index(path).values()))
    except TypeError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from None
    for file_name in names:
        beside = isinstance(file_name, str) and Path(file_name).name == file_name
        if not beside or not file_name.endswith(".safetensors"):
            raise UnsupportedModelError(f"{path} names {file_name!r}, which is not a .safetensors file beside it")
    return names


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= header_len <= min(size - 8, _MAX_HEADER_BYTES):
            raise UnsupportedModelError(f"{path} is not a safetensors file, or is cut off ({size:,} bytes)")
        try:
            header = json.loads(file.read(header_len))
        except (ValueError, RecursionError) as error:
            raise UnsupportedModelError(f"{path} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise UnsupportedModelError(f"{path} has a header that is not a JSON object")
    return header, 8 + header_len


def _check_tensors(path: Path, header: dict[str, Any], data_start: int) -> list[tuple[str, int, int]]:
    """(dtype, begin, end) of every tensor in file order: they fill the data exactly, without gap or overlap."""
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole or not isinstance(dtype, str) or begin > end:
            raise UnsupportedModelError(f"{path} has a damaged header: tensor {name!r} is not described properly")
        if dtype in _BYTES and math.prod(shape) * _BYTES[dtype] != end - begin:
            raise UnsupportedModelError(
                f"{path}: tensor {name!r} of shape {shape} and type {dtype} does not fit its {end - begin} bytes"
            )
        tensors.append((dtype, begin, end))
    tensors.sort(key=lambda tensor: tensor[1:])
    position = 0
    for _, begin, end in tensors:
        if begin != position:
            raise UnsupportedModelError(f"{path} has a damaged header: tensors overlap or leave a gap at {position}")
        position = end
    size = path.stat().st_size
    if data_start + position != size:
        raise UnsupportedModelError(
            f"{path} is {size:,} bytes long, but its header says {data_start + position:,}; "
            "was the download interrupted?"
        )
    return tensors


def _places(begin: int, end: int) -> list[int]:
    """The offsets at which a tensor is sampled: its start, middle and end."""
    last = max(begin, end - _SAMPLE_BYTES)
    return sorted({begin, (begin + last) // 2, last})
