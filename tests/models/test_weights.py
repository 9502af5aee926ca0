"""Weight files are checked before anything is loaded from them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.errors import UnsupportedModelError
from batchjob.models.weights import read_weights


def file_of(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, *, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape or [(end - begin) // 4], "data_offsets": [begin, end]}


GOOD = file_of({"__metadata__": {"format": "pt"}, "a": entry(0, 8), "b": entry(8, 16)}, bytes(16))


def test_a_sound_file_passes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    weights = read_weights(tmp_path, name="m")
    assert (weights.files, weights.main_dtype) == (("model.safetensors",), "F32")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off"),
        (GOOD[:20], "cut off"),
        (struct.pack("<Q", 2**63) + b"{}", "cut off"),
        (GOOD[:-1], "interrupted"),
        (GOOD + b"\0", "interrupted"),
        (struct.pack("<Q", 4) + b"nope", "damaged header"),
        (file_of([1], b""), "not a JSON object"),
        (file_of({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "overlap"),
        (file_of({"a": entry(0, 8), "b": entry(12, 16)}, bytes(16)), "gap"),
        (file_of({"a": entry(0, 8, shape=[2**40, 2**40])}, bytes(8)), "does not fit"),
        (file_of({"a": entry(0, 8, shape=[-2, -1])}, bytes(8)), "not described"),
        (file_of({"a": {"dtype": "F32"}}, bytes(8)), "not described"),
        (file_of({"a": 7}, bytes(8)), "not described"),
    ],
)
def test_damage_is_found_in_the_header(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        read_weights(tmp_path, name="m")


@given(position=st.integers(0, len(GOOD) - 17), value=st.integers(0, 255))
def test_any_changed_byte_of_the_header_is_sound_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    directory = tmp_path_factory.mktemp("m")
    (directory / "model.safetensors").write_bytes(GOOD[:position] + bytes([value]) + GOOD[position + 1 :])
    try:
        weights = read_weights(directory, name="m")
    except UnsupportedModelError:
        return
    assert weights.files == ("model.safetensors",)


def test_weights_in_several_files_must_all_be_there(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(GOOD)
    with pytest.raises(UnsupportedModelError, match=r"model-2\.safetensors.*1 of 2"):
        read_weights(tmp_path, name="m")
    (tmp_path / "model-1.safetensors").write_bytes(file_of({"a": entry(0, 8)}, bytes(8)))
    (tmp_path / "model-2.safetensors").write_bytes(file_of({"b": entry(0, 8)}, bytes(8)))
    assert read_weights(tmp_path, name="m").files == ("model-1.safetensors", "model-2.safetensors")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "model.bin", 7, "a/b.safetensors"])
def test_an_index_may_only_name_safetensors_beside_it(tmp_path: Path, name: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UnsupportedModelError, match=r"not a \.safetensors file beside it"):
        read_weights(tmp_path, name="m")


def test_models_with_very_many_tensors_are_still_told_apart(tmp_path: Path) -> None:
    count = 5000
    header = {f"t{i:05}": entry(4 * i, 4 * i + 4) for i in range(count)}
    digests = set()
    for fill in (0, 1):
        (tmp_path / "model.safetensors").write_bytes(file_of(header, bytes([fill]) * 4 * count))
        digests.add(read_weights(tmp_path, name="m").digest)
    assert len(digests) == 2
