"""Compiles the CUDA kernels on demand and keeps the result: `cubin(variant, arch)`.

A *variant* is one source file with its types and sizes fixed; one model needs two or three of them, about a second
each. Results lie in the user's cache directory, named by a hash of everything that goes into them. A file lock lets
one of several processes compile while the others wait for what it makes. To compile ahead of time:

    python -m batchjob_kernels.cuda_build --arch 80 90 100
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from batchjob_kernels.cuda_compilers import FLAGS, SOURCES, CompileError, Compiler, CompilerMissing, find_compiler

HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 2, 4, 8, 16)  # query heads per KV head; others take the next larger
TYPES = {torch.float16: "Half", torch.bfloat16: "Bf16", torch.float32: "float", torch.float8_e4m3fn: "Fp8"}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of queries, outputs, new keys and values
ARCHS = (80, 90, 100)

_log = logging.getLogger(__name__)
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Variant:
    source: str  # a file of `SOURCES`
    defines: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return "-".join((self.source.removesuffix(".cu"), *(value.lower() for _, value in self.defines)))


def decode_variant(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int) -> Variant:
    """Decode attention for `group` query heads per KV head, 1 to 16."""
    padded = 1 << (group - 1).bit_length()
    types = (("BATCHJOB_Q", TYPES[dtype]), ("BATCHJOB_CACHE", TYPES[kv_dtype]))
    return Variant("paged_decode.cu", (*types, ("BATCHJOB_HEAD_DIM", str(head_dim)), ("BATCHJOB_GROUP", str(padded))))


def write_variant(dtype: torch.dtype, kv_dtype: torch.dtype) -> Variant:
    return Variant("write_kv.cu", (("BATCHJOB_IN", TYPES[dtype]), ("BATCHJOB_CACHE", TYPES[kv_dtype])))


def all_variants(
    dtypes: Sequence[torch.dtype] = DTYPES, head_dims: Sequence[int] = HEAD_DIMS, groups: Sequence[int] = GROUPS
) -> list[Variant]:
    """Every variant of these sizes, with a cache of the same type and one of FP8."""
    pairs = [(dtype, kv) for dtype in dtypes for kv in (dtype, torch.float8_e4m3fn)]
    return [write_variant(*pair) for pair in pairs] + [
        decode_variant(*pair, head_dim, group) for pair, head_dim, group in itertools.product(pairs, head_dims, groups)
    ]


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchjob" / "kernels"


def cubin(variant: Variant, arch: int, *, compiler: Compiler | None = None, directory: Path | None = None) -> bytes:
    """Machine code of `variant` for compute capability `arch` (90: 9.0), from `directory` (default `cache_dir()`) or
    compiled now. `CompilerMissing` or `CompileError` if that fails. A directory that cannot be written is no error."""
    compiler = compiler or find_compiler()
    path = (directory or cache_dir()) / f"{variant.name}-sm{arch}-{_key(variant, arch, compiler)}.cubin"
    found = _read(path)
    if found is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            found = _read(path)  # another process may have made it by now
            if found is None:
                found = compiler.compile(variant.source, dict(variant.defines), arch)[0]
                _write(path, found)
            return found
    except OSError as error:
        _log.warning("compiled CUDA kernels cannot be kept, each process compiles them again: %s", error)
        return compiler.compile(variant.source, dict(variant.defines), arch)[0]


def _key(variant: Variant, arch: int, compiler: Compiler) -> str:
    texts = [path.read_bytes() for path in (SOURCES / variant.source, *sorted(SOURCES.glob("*.cuh")))]
    settings = repr((variant, arch, FLAGS, compiler.name, compiler.version))
    digest = hashlib.sha256()
    for part in (settings.encode(), *texts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _read(path: Path) -> bytes | None:
    """What `_write` left there; None if there is nothing, or not all of it."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() != digest:
        _log.warning("%s is damaged and is compiled again", path)
        return None
    return code


def _write(path: Path, code: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _device_archs() -> list[int]:
    if not torch.cuda.is_available():
        return list(ARCHS)
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return sorted(10 * major + minor for major, minor in capabilities)


def main(arguments: Sequence[str] | None = None) -> int:
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    parser = argparse.ArgumentParser(
        prog="python -m batchjob_kernels.cuda_build", description="Compiles the CUDA kernels."
    )
    parser.add_argument("--arch", type=int, nargs="+", help="compute capabilities, as 90; default: of the devices here")
    parser.add_argument("--dtype", choices=names, nargs="+", default=list(names))
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--group", type=int, choices=GROUPS, nargs="+", default=GROUPS, help="query heads per KV head")
    parser.add_argument("--compiler", choices=("nvrtc", "nvcc"), help="default: NVRTC where there is one, else nvcc")
    options = parser.parse_args(arguments)
    try:
        compiler = find_compiler(options.compiler)
        variants = all_variants([names[name] for name in options.dtype], options.head_dim, options.group)
        work = list(itertools.product(variants, options.arch or _device_archs()))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sizes = [len(code) for code in pool.map(lambda item: cubin(*item, compiler=compiler), work)]
    except (CompilerMissing, CompileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB, {compiler.name} {compiler.version}, in {cache_dir()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
