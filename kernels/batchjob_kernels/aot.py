"""Compiles every Triton kernel for GPUs that need not be there, and reports the result.

    python -m batchjob_kernels.aot [--capability 80 90] [--only WORD] [--quick] [--json FILE]

A row per kernel and compute capability: registers per thread, bytes per thread spilled to local memory, shared memory
per block, and how many instructions of the machine code use the tensor cores or read 16 bytes from global memory.
Registers come from the compiler's own note in the binary, the rest is counted in its disassembly (tools of the Triton
wheel). Each kernels' module names its cases in a list `AOT`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from batchjob_kernels import triton_kernels
from batchjob_kernels.triton_kernels.aot_case import AotCase

CAPABILITIES = (80, 89, 90, 100)

# Tensor cores: warp-wide, by four warps (Hopper), and the fifth generation's (Blackwell).
_TENSOR_CORE = re.compile(r"\b(?:[HQIO]G?MMA|UTC[A-Z]*MMA)\b")
_WIDE_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.(?:\w+\.)*128\b|\b(?:UBLKCP|UTMALDG)\b")
_SPILL = re.compile(r"\b(?:STL|LDL)((?:\.\w+)*)\s")


@dataclass(frozen=True, slots=True)
class Row:
    kernel: str
    capability: int
    registers: int = 0
    spill_bytes: int = 0  # per thread, by the instructions that store to and load from local memory
    shared_bytes: int = 0
    tensor_core: int = 0
    wide_loads: int = 0
    is_matmul: bool = False
    wants_wide_loads: bool = False
    note: str = ""  # why there is nothing


def cases() -> list[AotCase]:
    """The cases of all modules of kernels."""
    found: list[AotCase] = []
    for module in pkgutil.iter_modules(triton_kernels.__path__):
        found += getattr(importlib.import_module(f"{triton_kernels.__name__}.{module.name}"), "AOT", [])
    return found


def compile_case(case: AotCase, capability: int) -> Row:
    """Compiles one case for one compute capability (90 is 9.0). Errors of the compiler are raised."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for index, parameter in enumerate(case.fn.params):
        name = parameter.name
        signature[name] = kind = "constexpr" if name in case.constexprs else case.signature[name]
        unknown = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment or name in case.unaligned
        if not unknown and kind.startswith(("*", "i")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.fn, signature, dict(case.constexprs), attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, code = _disassemble(compiled.asm["cubin"])
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None or "EXIT" not in code:
        raise RuntimeError(f"{case.name}: no machine code in what cuobjdump printed")
    return Row(
        case.name,
        capability,
        registers=int(registers[1]),
        spill_bytes=spilled_bytes(code),
        shared_bytes=compiled.metadata.shared,
        tensor_core=len(_TENSOR_CORE.findall(code)),
        wide_loads=len(_WIDE_LOAD.findall(code)),
        is_matmul=case.is_matmul,
        wants_wide_loads=case.wide_loads,
    )


def spilled_bytes(code: str) -> int:
    """Bytes that one thread stores to and loads from local memory, each instruction counted once."""
    modifiers = [found.split(".") for found in _SPILL.findall(code)]
    return sum(16 if "128" in each else 8 if "64" in each else 4 for each in modifiers)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """The resources that the binary names, and its machine code as text."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        texts = [
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        ]
    return texts[0], texts[1]


def _work(job: tuple[int, int]) -> Row:
    """Case by its place in `cases()` (kernels cannot be sent to another process), and capability."""
    case, capability = cases()[job[0]], job[1]
    if capability < case.min_capability:
        return Row(case.name, capability, note=f"needs {case.min_capability / 10}")
    try:
        return compile_case(case, capability)
    except Exception as error:
        return Row(case.name, capability, note=f"failed: {type(error).__name__}: {error}".splitlines()[0])


def compile_all(
    capabilities: Sequence[int], *, only: str = "", quick: bool = False, processes: int = 1
) -> Iterator[Row]:
    """One row per case and capability. A case that is for other capabilities alone has none."""
    jobs = [
        (index, capability)
        for index, case in enumerate(cases())
        for capability in capabilities
        if only in case.name and (case.quick or not quick) and capability <= case.max_capability
        if capability >= case.min_capability or case.min_capability != case.max_capability
    ]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_work, jobs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m batchjob_kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES), help="90 is 9.0")
    parser.add_argument("--only", default="", help="kernels with this in their name")
    parser.add_argument("--quick", action="store_true", help="a few cases only")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the rows there")
    chosen = parser.parse_args(arguments)
    import triton

    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: the interpreter compiles nothing", file=sys.stderr)
        return 2
    line = "{:58} {:>5} {:>5} {:>7} {:>7} {:>7} {:>7}"
    print(line.format("kernel", "cap.", "regs", "spilled", "shared", "tensor", "16-byte"))
    rows: list[Row] = []
    for row in compile_all(chosen.capability, only=chosen.only, quick=chosen.quick, processes=chosen.processes):
        rows.append(row)
        numbers = [row.registers, row.spill_bytes, row.shared_bytes, row.tensor_core, row.wide_loads]
        text = line.format(row.kernel, row.capability / 10, *numbers)
        print(f"{row.kernel:58} {row.capability / 10:5} {row.note}" if row.note else text, flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 1 if any(row.note.startswith("failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
