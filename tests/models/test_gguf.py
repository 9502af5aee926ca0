"""GGUF files: a hostile header is refused at once, a sound file is converted once."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.errors import StorageError, UnsupportedModelError
from batchjob.models import gguf, resolve_model
from batchjob.models.gguf_header import check_header


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(*, tensors: int = 1, pairs: int = 2, version: int = 3) -> bytes:
    """A sound header of two pairs (a number and an array of strings) and one tensor, with its counts as given."""
    array = struct.pack("<IIQ", 9, 8, 2) + string("a") + string("b")
    number = struct.pack("<II", 4, 32)
    tensor = string("w") + struct.pack("<IQIQ", 1, 4, 0, 0)
    start = b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)
    return start + string("block_count") + number + string("tokens") + array + tensor + bytes(32)


def test_a_sound_header_passes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header())
    check_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04", "not a GGUF file"),
        (b"GGUF", "damaged header"),
        (header(version=1), "version 1"),
        (header(tensors=2**61), "tensors, more than the file could hold"),
        (header(pairs=2**61), "pairs, more than the file could hold"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + bytes(64), "more bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 8, 2**60), "array items"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9,
         "too deep"),
        (header()[:-33], "damaged header"),
    ],
)  # fmt: skip
def test_a_hostile_header_is_refused_at_once(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    start = time.monotonic()
    with pytest.raises(UnsupportedModelError, match=message):
        check_header(path)
    assert time.monotonic() - start < 1


@given(position=st.integers(0, len(header()) - 1), value=st.integers(0, 255))
def test_any_changed_byte_is_sound_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    path = tmp_path_factory.mktemp("g") / "m.gguf"
    content = bytearray(header())
    content[position] = value
    path.write_bytes(content)
    try:
        check_header(path)
    except UnsupportedModelError:
        return
    assert path.stat().st_size == len(header())


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHJOB_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "My model (1).gguf"
    path.write_bytes(header())
    return path


def test_a_file_is_converted_once_even_by_many_at_a_time(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def convert(path: Path, work: Path) -> None:
        calls.append(path)
        time.sleep(0.05)
        (work / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_run_child", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(gguf.convert_gguf(source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [source]
    assert len(set(found)) == 1
    assert (found[0] / "config.json").is_file()
    assert found[0].name.startswith("My_model__1_-")


def test_another_file_of_the_same_name_is_another_model(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_run_child", lambda path, work: None)
    first = gguf.convert_gguf(source)
    source.write_bytes(header() + b"\1")
    assert gguf.convert_gguf(source) != first


def test_whoever_loses_the_race_takes_the_winners_files(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(path: Path, work: Path) -> None:
        """Another machine, for which the lock means nothing, is done first."""
        (work / "mine").touch()
        target = gguf.cache_dir() / "gguf" / work_target
        target.mkdir()
        (target / "theirs").touch()

    work_target = f"My_model__1_-{gguf._digest(source)[:16]}-v{gguf._FORMAT}"
    monkeypatch.setattr(gguf, "_run_child", convert)
    target = gguf.convert_gguf(source)
    assert [path.name for path in target.iterdir()] == ["theirs"]
    assert not list(target.parent.glob(".converting-*"))


def test_a_conversion_that_fails_leaves_nothing_and_can_be_tried_again(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UnsupportedModelError, match="could not be converted: the converter ended with status 1"):
        gguf.convert_gguf(source)
    assert [path.suffix for path in (gguf.cache_dir() / "gguf").iterdir()] == [".lock"]
    monkeypatch.setattr(gguf, "_run_child", lambda path, work: None)
    assert gguf.convert_gguf(source).is_dir()


def test_the_child_may_not_use_up_the_machines_memory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(0.3)\nbytearray(1 << 40)\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(UnsupportedModelError, match="MemoryError"):
        gguf.convert_gguf(source)


def test_a_missing_package_is_named_with_its_remedy(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'batchjob\[demo\]'"):
        gguf.convert_gguf(source)


def test_a_cache_that_cannot_be_written_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHJOB_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(StorageError, match="BATCHJOB_CACHE_DIR"):
        gguf.convert_gguf(source)


@pytest.mark.real_model
def test_the_converted_model_has_its_template_length_and_end_token(smollm2: Path) -> None:
    info = resolve_model(str(smollm2))
    assert (info.max_model_len, info.checkpoint_dtype, info.eos_token_ids) == (8192, "float32", (2,))
    assert info.template_digest


@pytest.mark.real_model
def test_a_truncated_real_file_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as file:
        path.write_bytes(file.read(1_000_000))
    with pytest.raises(UnsupportedModelError, match="interrupted"):
        resolve_model(str(path))


def test_the_converter_is_a_program_that_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "batchjob.engine.model.gguf_convert"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "No module named" not in done.stderr
