"""A job must not come upon kernels that are yet to be compiled, for seconds each, all along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_steps_of_all_sizes_are_served_by_a_few_variants_of_each_kernel(project_root: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(project_root), str(project_root / "kernels")))
    program = Path(__file__).with_name("compilations.py")
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "write_kv_kernel": 1,  # of the check of the model before it is fused
        "rotary_write_kernel": 1,
        "rms_norm_kernel": 2,  # of rows, and of heads while parts are compared one by one
        "act_and_mul_kernel": 1,
        "attention_kernel": 5,  # decode steps and mixed ones, keys cut into parts or not; prompts
        "merge_kernel": 5,  # up to 2, 4, 8, 16 or 32 parts
        "groups_kernel": 1,
        "draw_kernel": 1,
        "ended_kernel": 1,
    }
