"""docs/gpu.md names flags and backends that there are, and claims no figure."""

from __future__ import annotations

import re
from pathlib import Path

from batchjob.spec import NEGATED, spec_fields
from batchjob_kernels.attention.select import BACKENDS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
OF_GPU_CHECK = {"--seconds", "--json", "--tiny"}


def test_every_flag_is_one() -> None:
    known = {"--" + f.name.replace("_", "-") for f in spec_fields()}
    known |= {"--no-" + name.replace("_", "-") for name in NEGATED}
    named = set(re.findall(r"(--[a-z][a-z0-9-]+)", TEXT))
    assert named <= known | OF_GPU_CHECK
    for name in ("attention_backend", "async_scheduling", "decode_steps_per_launch", "devices", "tensor_parallel"):
        assert "--" + name.replace("_", "-") in named


def test_the_backends_are_those_that_can_be_selected() -> None:
    assert re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE) == list(BACKENDS)


def test_no_speed_is_claimed() -> None:
    assert not re.search(r"\d[\d,.]* ?(tok/s|tokens/s|GB/s|TB/s|TFLOP)", TEXT)
