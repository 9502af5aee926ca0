"""The parts of `gpu_check`, in order: what matters most first, since the last ones fall away when time runs short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SMOKE = "smoke"


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    function: str  # see Task
    share: float  # of the whole budget, at most
    least: float  # seconds without which it is not worth starting
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    retries: tuple[dict[str, Any], ...] = ()  # settings of further tries, each where the one before has failed


def parts_for(shapes: Sequence[str], best: dict[str, Any], *, tiny: bool, on_cpu: bool) -> list[Part]:
    """`best` are the settings of the best configuration known, beside the engine's defaults."""
    first = shapes[0]
    parts = [Part(SMOKE, "gpu_smoke:smoke", 0.25, 5)]
    for shape in shapes:
        options = {"shape": shape, "workloads": ["published", "azure"], "profile": True}
        safer = ({**best, "cuda_graphs": False}, {**best, "cuda_graphs": False, "fuse": False})
        parts.append(Part(f"best/{shape}", "gpu_engine:measure", 0.25, 15, best, options, () if on_cpu else safer))
    for shape in shapes[:2]:
        options = {"shape": shape, "workload": "published"}
        # Its best settings, and what it chooses by itself.
        fast = {} if on_cpu else {"use_cuda_graph": True, "use_async_batching": True}
        retries: tuple[dict[str, Any], ...] = ({},) if fast else ()
        parts.append(Part(f"generate_batch/{shape}", "gpu_peers:generate_batch", 0.2, 15, fast, options, retries))
    parts.append(
        Part(f"generate/{first}", "gpu_peers:generate", 0.1, 12, {}, {"shape": first, "workload": "published"})
    )
    for backend in ("triton", "gather") if on_cpu else ("triton", "flash"):
        options = {"shape": shapes[-1], "backend": backend}
        share = 0.15 if backend == "triton" else 0.07
        parts.append(Part(f"attention, {backend}", "gpu_kernels:attention", share, 8, {}, options))
    parts.append(Part("other kernels", "gpu_kernels:others", 0.08, 8, {}, {"shape": shapes[-1]}))
    tests = {"files": "test_attention.py", "select": "gather and decode"} if tiny else {}
    parts.append(Part("kernel tests", "gpu_tests:kernel_tests", 0.3, 15, {}, tests))
    rows = {"rows": 48, "max_tokens": 16} if tiny else {"rows": 240, "max_tokens": 200}
    parts.append(Part("kill and resume", "gpu_commands:kill_and_resume", 0.2, 25, {}, rows))
    parts.append(Part("start", "gpu_commands:starts", 0.25, 20, best, {"shape": first}))
    return parts + _factors(first, best, on_cpu=on_cpu)


def _factors(shape: str, best: dict[str, Any], *, on_cpu: bool) -> list[Part]:
    """One thing at a time changed from the best configuration."""
    changes: dict[str, dict[str, Any]] = {
        "graphs off": {"cuda_graphs": False},
        "4 steps per launch": {"decode_steps_per_launch": 4},
        "8 steps per launch": {"decode_steps_per_launch": 8},
        "async off": {"async_scheduling": False},
        "fuse off": {"fuse": False},
        "flash": {"attention_backend": "flash", "block_size": 256},
        "fp8 KV": {"kv_cache_dtype": "fp8"},
        "64 sequences": {"max_num_seqs": 64},
        "128 sequences": {"max_num_seqs": 128},
        "gather": {"attention_backend": "gather"},
        "1 step per launch": {"decode_steps_per_launch": 1},
        "triton": {"attention_backend": "triton"},
    }
    if on_cpu:
        changes["async on"] = {"async_scheduling": True}
        changes["64 sequences"] = {"max_num_seqs": 4}
    defaults = {"decode_steps_per_launch": 1, "attention_backend": "auto" if on_cpu else "triton"}
    return [
        Part(f"{shape}, {name}", "gpu_engine:measure", 0.12, 12, {**best, **change}, {"shape": shape})
        for name, change in changes.items()
        if any({**defaults, **best}.get(key) != value for key, value in change.items())
    ]
