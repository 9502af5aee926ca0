"""The two compilers that turn the CUDA sources into machine code: NVRTC, a library that PyTorch's CUDA wheels bring,
and nvcc of a CUDA toolkit. NVRTC comes first, because it is there wherever such a PyTorch is.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Protocol

SOURCES = Path(__file__).parent / "csrc" / "cuda"
FLAGS = ("-std=c++17",)


class CompilerMissing(RuntimeError):
    """No compiler was found; the message says how to get one."""


class CompileError(RuntimeError):
    """The compiler refused; the message carries what it said."""


class Compiler(Protocol):
    name: str
    version: str

    def compile(self, source: str, defines: Mapping[str, str], arch: int) -> tuple[bytes, str]:
        """The machine code (a cubin) of the file `source` of `SOURCES` for compute capability `arch` (90: 9.0), and
        what the compiler said. `CompileError` if it refuses."""
        ...


class Nvrtc:
    """NVIDIA's run-time compiler. Needs no other program and no header file."""

    name = "nvrtc"

    def __init__(self, library: Path) -> None:
        self.library = library
        self._lib = ctypes.CDLL(str(library))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def _check(self, code: int) -> None:
        if code != 0:
            raise CompileError(f"{self.library}: {self._lib.nvrtcGetErrorString(code).decode()}")

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def compile(self, source: str, defines: Mapping[str, str], arch: int) -> tuple[bytes, str]:
        headers = sorted(SOURCES.glob("*.cuh"))
        texts = (ctypes.c_char_p * len(headers))(*[path.read_bytes() for path in headers])
        names = (ctypes.c_char_p * len(headers))(*[path.name.encode() for path in headers])
        options = [*FLAGS, f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v"]
        options += [f"-D{name}={value}" for name, value in defines.items()]
        program = ctypes.c_void_p()
        text = (SOURCES / source).read_bytes()
        self._check(
            self._lib.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), len(headers), texts, names)
        )
        try:
            arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            code = self._lib.nvrtcCompileProgram(program, len(options), arguments)
            said = self._text(program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
            if code != 0:
                reason = self._lib.nvrtcGetErrorString(code).decode()
                raise CompileError(f"NVRTC {self.version} could not compile {source} for sm_{arch}: {reason}\n{said}")
            return self._text(program, "CUBIN"), said
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))


class Nvcc:
    """The compiler of a CUDA toolkit; it needs a C++ compiler of the machine for its preprocessor."""

    name = "nvcc"

    def __init__(self, program: Path) -> None:
        self.program = program
        said = self._run(["--version"])
        found = re.search(r"release [\d.]+, V([\d.]+)", said)
        if found is None:
            raise CompileError(f"{program} --version does not name a version:\n{said}")
        self.version = found[1]

    def _run(self, arguments: list[str]) -> str:
        try:
            done = subprocess.run([self.program, *arguments], capture_output=True, text=True, check=False)
        except OSError as error:
            raise CompileError(f"{self.program} cannot be run: {error}") from error
        if done.returncode != 0:
            raise CompileError(f"{self.program} failed ({done.returncode}):\n{done.stderr or done.stdout}")
        return done.stdout + done.stderr

    def compile(self, source: str, defines: Mapping[str, str], arch: int) -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory(prefix="batchjob-nvcc-") as directory:
            out = Path(directory) / "out.cubin"
            options = [*FLAGS, "-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", "-o", str(out)]
            options += [f"-D{name}={value}" for name, value in defines.items()]
            try:
                said = self._run([*options, str(SOURCES / source)])
            except CompileError as error:
                raise CompileError(f"nvcc {self.version} could not compile {source} for sm_{arch}: {error}") from None
            return out.read_bytes(), said


def nvrtc_libraries() -> list[Path]:
    """Every NVRTC library in sight: those of Python packages, then those of toolkits."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) / "*" / "lib" for place in (spec.submodule_search_locations or [] if spec else [])]
    roots += [home / "lib64" for home in _toolkits()]
    found = [path for root in roots for path in _glob(root / "libnvrtc.so*")]
    return list(dict.fromkeys(path.resolve() for path in found))


def nvcc_programs() -> list[Path]:
    """Every nvcc in sight: that of PATH, then those of toolkits."""
    on_path = shutil.which("nvcc")
    found = [Path(on_path)] if on_path else []
    found += [home / "bin" / "nvcc" for home in _toolkits() if (home / "bin" / "nvcc").is_file()]
    return found


def _toolkits() -> list[Path]:
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [Path(place) for place in (*named, "/usr/local/cuda")]


def _glob(pattern: Path) -> Iterable[Path]:
    return sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))), reverse=True)


@lru_cache
def find_compiler(name: str | None = None) -> Compiler:
    """The compiler to use, or the one called `name` ("nvrtc", "nvcc"). `CompilerMissing` if none of them works."""
    problems = []
    kinds: list[tuple[type[Nvrtc] | type[Nvcc], list[Path]]] = [(Nvrtc, nvrtc_libraries()), (Nvcc, nvcc_programs())]
    for kind, paths in kinds:
        for path in paths if name in (None, kind.name) else []:
            try:
                return kind(path)
            except (OSError, CompileError) as error:
                problems.append(str(error))
    looked = "".join(f"\n  {problem}" for problem in problems)
    raise CompilerMissing(
        f"no CUDA compiler{f' called {name}' if name else ''} was found. NVRTC comes with PyTorch's CUDA wheels "
        "(package nvidia-cuda-nvrtc); nvcc comes with a CUDA toolkit, which is looked for on PATH, in CUDA_HOME and in "
        f"/usr/local/cuda.{looked}"
    )
