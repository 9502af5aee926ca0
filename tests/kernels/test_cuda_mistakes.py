"""Mistakes put into the CUDA kernels' sources on purpose: the comparison on the CPU must notice each of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from batchjob_kernels import cuda_backend, reference


def _load(name: str) -> ModuleType:
    """A module of cuda_shim: the tests are no package."""
    spec = importlib.util.spec_from_file_location(
        f"cuda_shim_{name}", Path(__file__).parent / "cuda_shim" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


host, cases = _load("host"), _load("cases")
Case, FULL, TOLERANCE, error_of, make_step = (
    cases.Case,
    cases.FULL,
    cases.TOLERANCE,
    cases.error_of,
    cases.make_step,
)
pytestmark = pytest.mark.skipif(host.GXX is None, reason="no g++")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shim_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda_mistakes")


MISTAKES = {
    "no barrier in the pipeline": ("filled next.\n        __syncthreads();", "filled next."),
    "no barrier before the stages are reused": ('"it fits");\n    __syncthreads();', '"it fits");'),
    "no barrier before the warps are merged": (
        "__syncthreads();\n    for (int index = threadIdx.x",
        "for (int index = threadIdx.x",
    ),
    "no wait for copies": ("async_wait<kStages - 2>();", ""),
    "waits for one group too few": ("async_wait<kStages - 2>();", "async_wait<kStages - 1>();"),
    "an empty group is not ended": (
        "look_up(tile + kStages);\n        }\n        async_commit();",
        "look_up(tile + kStages);\n        async_commit();\n        }",
    ),
    "waits for copies after the barrier": (
        "async_wait<kStages - 2>();",
        "__syncthreads(); async_wait<kStages - 2>(); if (false)",
    ),
    "fills the stage in use": ("stage == 0 ? kStages - 1 : stage - 1", "stage"),
    "one key too many": ("cut.end_key = kv_len;", "cut.end_key = kv_len + 1;"),
    "the last tile left out": ("(kv_len + tile - 1) / tile", "kv_len / tile"),
    "a bound of the last tile off by one": (
        "const bool seen = key >= cut.first_key && key < cut.end_key;",
        "const bool seen = key >= cut.first_key && key <= cut.end_key;",
    ),
    "a window of one key more": ("kv_len - window : 0", "kv_len - window - 1 : 0"),
    "splits are not weighed": (
        "p.partial[(row * p.num_splits + split) * kHeadDim + d] * kept;",
        "p.partial[(row * p.num_splits + split) * kHeadDim + d];",
    ),
    "the last split left out": ("split < cut.used; ++split) {", "split < cut.used - 1; ++split) {"),
    "a sink in each split": (
        "split) * kHeadDim + d] = sum;",
        "split) * kHeadDim + d] = sum * all.sum * final_factor(all, p.sinks, head);",
    ),
    "no rescale of the sums": ("sums[h][i] *= kept_of_head;", "sums[h][i] *= 1.0f;"),
    "the last keys' largest score is missed": (
        "far < kLanes; far *= 2) {  // the lanes",
        "far < kLanes / 2; far *= 2) {  // the lanes",
    ),
    "a lane's part of a score is left out": ("} else if constexpr (kFar > 0) {", "} else if constexpr (kFar > 1) {"),
    "a weight of another lane": ("first_lane + score / kOwn * kSame", "first_lane + score / kOwn"),
    "some lanes leave before a barrier": (
        "if (key_of_warp == 0) {\n#pragma unroll",
        "if (threadIdx.x == 77) return;\n    if (key_of_warp == 0) {\n#pragma unroll",
    ),
    "copies past the end of the stages": (
        "reinterpret_cast<KV*>(shared + stage * kStage) + key_of_tile",
        "reinterpret_cast<KV*>(shared + (stage + 1) * kStage) + key_of_tile",
    ),
    "values read from the keys' place": ("const KV* values = keys + kTile * kHeadDim;", "const KV* values = keys;"),
    "a table row of another sequence": ("p.table_rows == nullptr ? seq : p.table_rows[seq]", "seq"),
    "heads of another group": ("(kv_head * p.group + head) * kHeadDim + dim, q[h]", "head * kHeadDim + dim, q[h]"),
}
NOT_LONG = (
    "no barrier in the pipeline",
    "no barrier before the warps are merged",
    "no wait for copies",
    "waits for copies after the barrier",
    "one key too many",
    "a bound of the last tile off by one",
    "splits are not weighed",
    "some lanes leave before a barrier",
)
PROBE = Case(FULL, FULL, 128, 4, lens=(1, 16, 40, 333), window=300, sinks=True, multiprocessors=3, tables="slots")


def probe(shim: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(cuda_backend, "driver", shim)
    plain, step = make_step(PROBE)
    expected = reference.paged_attention(plain.q, plain.kv, plain.cache, plain.meta, **plain.options)
    monkeypatch.setattr(shim, "num_multiprocessors", lambda device: PROBE.multiprocessors)
    shim.readable = step.cache
    out = cuda_backend.paged_attention(step.q, step.kv, step.cache, step.meta, **step.options)
    return error_of(PROBE, expected, out)


@pytest.mark.parametrize(
    "name", [name if name in NOT_LONG else pytest.param(name, marks=pytest.mark.long) for name in MISTAKES]
)
def test_a_mistake_is_noticed(name: str, shim_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = host.build(shim_directory / name.replace(" ", "-"), [PROBE.variant], [MISTAKES[name]])
    try:
        error = probe(shim, monkeypatch)
    except host.ShimError:
        return
    assert not error < TOLERANCE[FULL]


def test_without_a_mistake_none_is_noticed(shim_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = host.build(shim_directory / "sound", [PROBE.variant])
    assert probe(shim, monkeypatch) < TOLERANCE[FULL]
