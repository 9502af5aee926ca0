"""The Triton kernels compiled for GPUs that are not there: no spills on Hopper, wide loads, tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from batchjob_kernels import aot


def compiled(tmp_path: Path, project_root: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows that the command writes; in a process of its own, since the interpreter compiles nothing."""
    file = tmp_path / "rows.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "batchjob_kernels.aot", *arguments, "--json", str(file)],
        env=env | {"PYTHONPATH": str(project_root / "kernels")},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the rows, in words."""
    wide = {case.name: wide_loads_of_keys_and_values(case) for case in aot.cases() if case.is_matmul}
    found = []
    for row in rows:
        name = f"{row['kernel']} on {row['capability'] / 10}"
        if row["note"]:
            if not row["note"].startswith("needs"):
                found.append(f"{name}: {row['note']}")
            continue
        if row["capability"] == 90 and row["spill_bytes"]:
            found.append(f"{name}: {row['spill_bytes']} bytes spilled")
        if row["is_matmul"] and not row["tensor_core"]:
            found.append(f"{name}: no tensor cores")
        if row["wants_wide_loads"] and row["wide_loads"] < wide.get(row["kernel"], 1):
            found.append(f"{name}: {row['wide_loads']} loads of 16 bytes")
    return found


def wide_loads_of_keys_and_values(case: aot.AotCase) -> int:
    """Loads of 16 bytes with which each thread takes its share of one tile of keys and one of values."""
    itemsize = 1 if "fp8" in case.signature["cache"] else 2
    tile = case.constexprs["BLOCK_N"] * case.constexprs["DIM_PAD"] * itemsize
    return max(2, 2 * tile // (16 * 32 * case.num_warps))


def test_a_few_kernels_compile_well_for_hopper(tmp_path: Path, project_root: Path) -> None:
    rows = compiled(tmp_path, project_root, "--quick", "--capability", "90", "--processes", "2")
    assert any(row["is_matmul"] for row in rows)
    assert faults(rows) == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_kernel_compiles_well_everywhere(tmp_path: Path, project_root: Path) -> None:
    rows = compiled(tmp_path, project_root, "--processes", "2")
    assert {row["capability"] for row in rows} == set(aot.CAPABILITIES)
    assert faults(rows) == []


def test_faults_are_named() -> None:
    name = next(case.name for case in aot.cases() if case.is_matmul)
    good = {"kernel": name, "capability": 90, "spill_bytes": 0, "tensor_core": 8, "wide_loads": 99, "note": ""}
    good |= {"is_matmul": True, "wants_wide_loads": True}
    assert faults([good]) == []
    for change in ({"spill_bytes": 8}, {"tensor_core": 0}, {"wide_loads": 3}, {"note": "failed: PTXASError"}):
        assert len(faults([good | change])) == 1


def test_instructions_are_recognised_in_machine_code() -> None:
    code = """
        /*0010*/  LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR8][R4.64] ;
        /*0020*/  @P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/  LDG.E R4, desc[UR4][R2.64] ;
        /*0040*/  LDGSTS.E.LTC128B.64 [R7], desc[UR8][R4.64] ;
        /*0050*/  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0060*/  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0070*/  UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10] ;
        /*0080*/  FFMA R1, R2, R3, R4 ;
        /*0090*/  STL.64 [R1+0x8], R4 ;
        /*00a0*/  LDL.LU R4, [R1+0x8] ;
        /*00b0*/  STL.128 [R1], R4 ;
    """
    assert len(aot._TENSOR_CORE.findall(code)) == 3
    assert len(aot._WIDE_LOAD.findall(code)) == 2
    assert aot.spilled_bytes(code) == 8 + 4 + 16


def test_the_interpreter_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert aot.main([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err
