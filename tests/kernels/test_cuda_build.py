"""How the CUDA kernels are compiled: the machine code, the cache of compiled kernels, what is said on failure."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from batchjob_kernels import Requirements, cuda_backend, cuda_build, cuda_compilers, cuda_driver, gather
from batchjob_kernels.cuda_build import ARCHS, GROUPS, HEAD_DIMS, Variant, cubin, decode_variant, write_variant
from batchjob_kernels.cuda_compilers import CompileError, Compiler, CompilerMissing, Nvcc, Nvrtc, find_compiler

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
USUAL = decode_variant(BF16, BF16, 128, 4)


def compiler_or_skip(name: str) -> Compiler:
    try:
        return find_compiler(name)
    except CompilerMissing:
        pytest.skip(f"no {name}")


def cuobjdump() -> str:
    """The program that shows machine code: of a toolkit, or the one that Triton brings."""
    places = [os.environ.get("PATH", "")]
    spec = importlib.util.find_spec("triton")
    if spec is not None:
        places += [str(Path(place) / "backends" / "nvidia" / "bin") for place in spec.submodule_search_locations or ()]
    found = shutil.which("cuobjdump", path=os.pathsep.join(places))
    if found is None:
        pytest.skip("no cuobjdump")
    return found


@cache
def compiled(name: str, variant: Variant, arch: int) -> tuple[bytes, str]:
    compiler = compiler_or_skip(name)
    return compiler.compile(variant.source, dict(variant.defines), arch)


def any_compiler_or_skip() -> Compiler:
    try:
        return find_compiler()
    except CompilerMissing:
        pytest.skip("no compiler")


@dataclass(frozen=True)
class Usage:
    """What ptxas says of one kernel."""

    registers: int
    spilled_bytes: int
    static_shared_bytes: int


def usage_of(said: str) -> dict[str, Usage]:
    found = {}
    for name, text in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", said, re.S):
        numbers = [
            re.search(pattern, text)
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
        ]
        assert all(numbers), text
        registers, stores, loads = (int(number[1]) for number in numbers if number)
        shared = re.search(r"(\d+) bytes smem", text)
        found[name] = Usage(registers, stores + loads, int(shared[1]) if shared else 0)
    return found


def check_usage(said: str, arch: int) -> None:
    usage = usage_of(said)
    assert usage
    for name, used in usage.items():
        # Four blocks of 128 threads, with their 48 KiB each that the launch asks for, fit one multiprocessor.
        assert used.registers <= 128, name
        assert used.static_shared_bytes == 0, name
        if arch == 90:
            assert used.spilled_bytes == 0, name


ALL = [
    decode_variant(*types, head_dim, group)
    for types in ((BF16, BF16), (BF16, FP8), (torch.float32, torch.float32), (torch.float16, torch.float16))
    for head_dim in HEAD_DIMS
    for group in GROUPS
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["nvrtc", "nvcc"])
def test_compiles_without_spills(name: str, arch: int) -> None:
    for variant in (USUAL, write_variant(BF16, BF16)):
        code, said = compiled(name, variant, arch)
        assert code.startswith(b"\x7fELF")
        check_usage(said, arch)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_compiles_without_spills(arch: int) -> None:
    compiler = any_compiler_or_skip()
    for variant in [*ALL, write_variant(BF16, BF16), write_variant(BF16, FP8)]:
        check_usage(compiler.compile(variant.source, dict(variant.defines), arch)[1], arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_keys_and_values_move_16_bytes_at_a_time(arch: int, tmp_path: Path) -> None:
    compiler = any_compiler_or_skip()

    def instructions(variant: Variant, function: str) -> list[str]:
        path = tmp_path / "kernel.cubin"
        path.write_bytes(compiled(compiler.name, variant, arch)[0])
        command = [cuobjdump(), "--dump-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return re.findall(
            r"\b([A-Z]+[A-Z0-9]*(?:\.[A-Z0-9]+)*) ", text.split(f"Function : {function}")[1].split("Function :")[0]
        )

    decode = instructions(USUAL, "batchjob_decode")
    copies = [name for name in decode if name.startswith("LDGSTS")]
    assert (
        len(copies) == 24
    )  # three stages are filled in three places, each with four copies of keys and as many of values
    assert set(copies) == {"LDGSTS.E.BYPASS.128"}
    assert sum(name == "LDS.128" for name in decode) >= 8  # four keys and four values of a lane
    assert not [name for name in decode if name.split(".")[0] in ("LDL", "STL")]  # nothing in local memory
    write = instructions(write_variant(BF16, BF16), "batchjob_write_kv")
    assert [sum(name.startswith(start) for name in write) for start in ("LDG.E.128", "STG.E.128")] == [1, 1]


class CountingCompiler:
    """Writes a line for each compilation, takes a while for it, and answers with what it was asked for."""

    def __init__(self, log: Path, seconds: float = 0.0) -> None:
        self.name, self.version = "counting", "1"
        self.log, self.seconds = log, seconds

    def compile(self, source: str, defines: Mapping[str, str], arch: int) -> tuple[bytes, str]:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        return f"{source} {defines} {arch}".encode(), ""

    def count(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def counting(tmp_path: Path) -> CountingCompiler:
    return CountingCompiler(tmp_path / "log")


def test_compiled_once_and_kept(counting: CountingCompiler, tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "kernels"
    first = cubin(USUAL, 90, compiler=counting, directory=directory)
    assert cubin(USUAL, 90, compiler=counting, directory=directory) == first
    assert counting.count() == 1
    # Everything that goes into the code makes an entry of its own.
    cubin(USUAL, 80, compiler=counting, directory=directory)
    cubin(decode_variant(BF16, BF16, 128, 8), 90, compiler=counting, directory=directory)
    counting.version = "2"
    cubin(USUAL, 90, compiler=counting, directory=directory)
    assert counting.count() == 4


def test_changed_sources_are_compiled_again(
    counting: CountingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(cuda_build.SOURCES, sources)
    monkeypatch.setattr(cuda_build, "SOURCES", sources)
    for changed in (None, "paged_decode.cu", "numbers.cuh"):
        if changed is not None:
            with (sources / changed).open("a") as file:
                file.write("// another line\n")
        for _ in range(2):
            cubin(USUAL, 90, compiler=counting, directory=tmp_path / "cache")
    assert counting.count() == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_entry_is_compiled_again(
    damage: str, counting: CountingCompiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = cubin(USUAL, 90, compiler=counting, directory=tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.cubin")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes({"cut": path.read_bytes()[:-3], "flipped": bytes(content), "empty": b""}[damage])
    assert cubin(USUAL, 90, compiler=counting, directory=tmp_path / "cache") == first
    assert counting.count() == 2
    assert "damaged" in caplog.text
    assert cubin(USUAL, 90, compiler=counting, directory=tmp_path / "cache") == first
    assert counting.count() == 2


def _compile_slowly(log: Path, directory: Path) -> None:
    cubin(USUAL, 90, compiler=CountingCompiler(log, seconds=0.5), directory=directory)


def test_of_several_processes_one_compiles(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    arguments = (tmp_path / "log", tmp_path / "cache")
    processes = [context.Process(target=_compile_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert CountingCompiler(tmp_path / "log").count() == 1
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_failed_compilation_leaves_nothing(tmp_path: Path) -> None:
    class Broken(CountingCompiler):
        def compile(self, source: str, defines: Mapping[str, str], arch: int) -> tuple[bytes, str]:
            raise CompileError("no")

    with pytest.raises(CompileError):
        cubin(USUAL, 90, compiler=Broken(tmp_path / "log"), directory=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_no_error(
    counting: CountingCompiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert cubin(USUAL, 90, compiler=counting, directory=tmp_path / "file" / "kernels").startswith(b"paged_decode.cu")
    assert "cannot be kept" in caplog.text


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cuda_build.cache_dir() == tmp_path / "batchjob" / "kernels"


@pytest.mark.parametrize("name", ["nvrtc", "nvcc"])
def test_a_compilers_own_message_is_shown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_or_skip(name)
    (tmp_path / "broken.cu").write_text('#include "here.cuh"\nextern "C" __global__ void f() { here(); nowhere(); }\n')
    (tmp_path / "here.cuh").write_text("__device__ inline void here() {}\n")
    monkeypatch.setattr(cuda_compilers, "SOURCES", tmp_path)
    with pytest.raises(CompileError, match=r"could not compile broken\.cu for sm_90(.|\n)*\"nowhere\" is undefined"):
        compiler.compile("broken.cu", {}, 90)
    monkeypatch.undo()
    with pytest.raises(CompileError, match=r"sm_12345"):
        compiler.compile(USUAL.source, dict(USUAL.defines), 12345)


def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find_compiler.cache_clear()
    monkeypatch.setattr(cuda_compilers, "nvrtc_libraries", lambda: [])
    monkeypatch.setattr(cuda_compilers, "nvcc_programs", lambda: [])


@pytest.fixture(autouse=True)
def _fresh_search() -> Any:
    find_compiler.cache_clear()
    yield
    find_compiler.cache_clear()


def test_no_compiler_says_where_to_get_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nothing_found(monkeypatch)
    with pytest.raises(CompilerMissing, match=r"PyTorch's CUDA wheels(.|\n)*CUDA_HOME"):
        find_compiler()
    assert cuda_build.main(["--arch", "90"]) == 1
    assert "nvidia-cuda-nvrtc" in capsys.readouterr().err


def test_a_compiler_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing_found(monkeypatch)
    not_a_library, not_a_program = tmp_path / "libnvrtc.so.13", tmp_path / "nvcc"
    not_a_library.write_text("")
    not_a_program.write_text("#!/bin/sh\necho it is broken >&2; exit 3\n")
    not_a_program.chmod(0o755)
    monkeypatch.setattr(cuda_compilers, "nvrtc_libraries", lambda: [not_a_library])
    monkeypatch.setattr(cuda_compilers, "nvcc_programs", lambda: [not_a_program])
    with pytest.raises(CompilerMissing, match=r"libnvrtc\.so\.13(.|\n)*it is broken"):
        find_compiler()


def test_compilers_are_looked_for_in_a_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in (tmp_path / "lib64" / "libnvrtc.so.12", tmp_path / "bin" / "nvcc"):
        path.parent.mkdir()
        path.write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert tmp_path / "lib64" / "libnvrtc.so.12" in cuda_compilers.nvrtc_libraries()
    assert tmp_path / "bin" / "nvcc" in cuda_compilers.nvcc_programs()


def test_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the command compiles is what is found later: no compilation follows."""
    compiler = any_compiler_or_skip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = ["--dtype", "bfloat16", "--head-dim", "128", "--group", "4"]
    assert cuda_build.main(["--arch", "90", *sizes]) == 0
    assert re.match(rf"4 kernels, .*{compiler.name} {compiler.version}, in {tmp_path}", capsys.readouterr().out)
    counting = CountingCompiler(tmp_path / "log")
    counting.name, counting.version = compiler.name, compiler.version
    assert cubin(USUAL, 90, compiler=counting).startswith(b"\x7fELF")
    assert cubin(write_variant(BF16, FP8), 90, compiler=counting).startswith(b"\x7fELF")
    assert counting.count() == 0


NEED = Requirements(torch.device("cuda"), (9, 0), BF16, BF16, frozenset({128}), frozenset({4}), 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": torch.device("cpu"), "capability": None}, "need a CUDA device, not cpu"),
        ({"capability": (7, 5)}, "need compute capability 8.0 (asynchronous copies), the device has 7.5"),
        ({"dtype": torch.float64, "kv_dtype": torch.float64}, "not in float64 with a cache of float64"),
        ({"kv_dtype": torch.float16}, "not in bfloat16 with a cache of float16"),
        ({"head_dims": frozenset({128, 96})}, "head sizes 64, 128, 256, not 96"),
        ({"group_sizes": frozenset({4, 32})}, "up to 16 query heads per KV head, not 32"),
        ({"block_size": 24}, "power of two and at least 8, not 24"),
        ({"block_size": 4}, "power of two and at least 8, not 4"),
        ({"deterministic": True}, "by the number of sequences"),
    ],
)
def test_says_why_it_cannot(change: dict[str, Any], reason: str) -> None:
    assert reason in (cuda_backend.refusal(replace(NEED, **change)) or "")


def test_says_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[type[Nvrtc] | type[Nvcc]] = []
    monkeypatch.setattr(cuda_backend, "find_compiler", lambda: found.append(Nvrtc))
    monkeypatch.setattr(cuda_driver, "missing", lambda: "NVIDIA's driver library cannot be loaded: gone")
    assert "cannot be loaded: gone" in (cuda_backend.refusal(NEED) or "")
    assert found
    monkeypatch.setattr(cuda_driver, "missing", lambda: None)
    monkeypatch.setattr(cuda_backend, "_other_backend", lambda: gather)
    assert cuda_backend.refusal(NEED) is None
    assert "prompts go to gather, which refuses: " in (cuda_backend.refusal(replace(NEED, kv_dtype=FP8)) or "")
    monkeypatch.undo()
    nothing_found(monkeypatch)
    assert "no CUDA compiler was found" in (cuda_backend.refusal(NEED) or "")
