"""The CUDA kernels against the reference: on a CUDA device where there is one, else on the CPU machine of cuda_shim."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from batchjob_kernels import AttnMeta, cuda_backend, cuda_driver, gather, reference
from batchjob_kernels.cuda_build import Variant, write_variant


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
Case, Step, TOLERANCE, error_of, make_step = (
    cases.Case,
    cases.Step,
    cases.TOLERANCE,
    cases.error_of,
    cases.make_step,
)
HALF, BF16, FULL, FP8 = cases.HALF, cases.BF16, cases.FULL, cases.FP8
ON_DEVICE = os.path.exists("/dev/nvidiactl") and torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_DEVICE else "cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shim_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda_shim")


@pytest.fixture(scope="session")
def shim(shim_directory: Path) -> Any:
    if host.GXX is None:
        pytest.skip("no g++")
    variants = {case.variant for case in CASES} | {write_variant(*pair) for pair in WRITES}
    return host.build(shim_directory / "kernels", sorted(variants, key=lambda variant: variant.name))


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the kernels run on, put where the backend looks for it."""
    if ON_DEVICE:
        return cuda_driver
    shim = request.getfixturevalue("shim")
    monkeypatch.setattr(cuda_backend, "driver", shim)
    return shim


def attend(machine: Any, case: Case, step: Step, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    step = step.to(DEVICE)
    monkeypatch.setattr(machine, "num_multiprocessors", lambda device: case.multiprocessors)
    machine.readable = step.cache
    out = cuda_backend.paged_attention(step.q, step.kv, step.cache, step.meta, **step.options)
    assert out.dtype == case.dtype
    return out.cpu()


TYPES = ((FULL, FULL), (HALF, HALF), (BF16, BF16), (HALF, FP8), (BF16, FP8), (FULL, FP8))
RAGGED = (1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 260)
LONG = (1, 127, 128, 129, 511, 512, 513, 700)
CASES = [
    # every type, at 128 with four heads over each KV head, which most models have
    *(Case(*types, 128, 4, lens=RAGGED, seed=1) for types in TYPES),
    *(Case(*types, 128, 4, lens=LONG, multiprocessors=4, seed=2) for types in TYPES),
    # every head size in the types of most runs
    *(Case(BF16, BF16, head_dim, 2, lens=RAGGED, seed=3) for head_dim in (64, 128, 256)),
    *(Case(BF16, FP8, head_dim, 2, lens=RAGGED, seed=4) for head_dim in (64, 256)),
    *(Case(FULL, FULL, 256, 2, lens=LONG, multiprocessors=8, tables=form) for form in ("lists", "slots")),
    # every number of heads over one KV head
    *(Case(group=group, lens=(1, 33, 64, 150), multiprocessors=1 + group % 3 * 4, seed=5) for group in range(1, 17)),
    *(Case(BF16, BF16, 128, group, num_kv_heads=1, lens=(5, 130, 64), seed=6) for group in (8, 16)),
    # block sizes
    *(Case(block_size=size, lens=(1, size - 1, size, size + 1, 2 * size, 300)) for size in (8, 16, 32, 64, 128, 256)),
    *(Case(BF16, BF16, 128, 4, block_size=size, lens=(1, size, 3 * size + 1)) for size in (8, 32, 128)),
    # windows, with keys before them in the first tile, and splits of them
    *(Case(window=window, lens=RAGGED, seed=7) for window in (1, 2, 16, 31, 32, 33, 100, 1000)),
    *(Case(window=window, lens=LONG, multiprocessors=6, seed=8) for window in (1, 130, 257, 400, 600)),
    # soft-caps and sinks, with and without splits, and all at once
    *(Case(softcap=cap, group=4, lens=LONG, multiprocessors=count) for cap in (3.0, 50.0) for count in (1, 4)),
    *(Case(sinks=True, group=4, lens=LONG, multiprocessors=count) for count in (1, 4, 64)),
    *(
        Case(*types, 128, 4, window=200, softcap=20.0, sinks=True, lens=LONG, multiprocessors=4, tables="slots")
        for types in TYPES
    ),
    # the number of splits
    *(Case(lens=(1, 256, 257, 1000), multiprocessors=count, seed=9) for count in (1, 2, 3, 5, 9, 64)),
    # rows that pad a step
    *(Case(lens=RAGGED, padding_rows=5, tables=form, multiprocessors=3) for form in ("lists", "slots")),
    Case(BF16, BF16, 128, 4, lens=(40,), padding_rows=7, tables="slots"),
]
WRITES = ((FULL, FULL), (HALF, HALF), (BF16, BF16), (HALF, FP8), (BF16, FP8), (FULL, FP8))


def name_of(case: Case) -> str:
    default, parts = Case(), []
    for name in Case.__dataclass_fields__:
        value = getattr(case, name)
        if value != getattr(default, name) and name not in ("lens", "seed"):
            parts.append(f"{name}={str(value).removeprefix('torch.')}")
    return "-".join(parts) + f"-{len(case.lens)}x{max(case.lens)}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_decode_equals_the_reference(
    case: Case, machine: Any, monkeypatch: pytest.MonkeyPatch, check_close: Callable[[str, Tensor, Tensor, float], None]
) -> None:
    plain, step = make_step(case)
    expected = reference.paged_attention(plain.q, plain.kv, plain.cache, plain.meta, **plain.options)
    actual = attend(machine, case, step, monkeypatch)
    name = f"CUDA decode{', FP8 cache' if case.kv_dtype == FP8 else ''}"
    check_close(name, actual, expected, TOLERANCE[case.dtype])
    assert error_of(case, expected, actual) < TOLERANCE[case.dtype]


def test_the_split_follows_the_launch_and_not_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, int, int]] = []

    class Recorder:
        @staticmethod
        def launch(variant: Variant, entry: str, grid: tuple[int, int, int], *_: Any) -> None:
            grids.append(grid)

        @staticmethod
        def num_multiprocessors(device: torch.device) -> int:
            return 132

    monkeypatch.setattr(cuda_backend, "driver", Recorder)
    for lens in ((1,) * 8, (900,) * 8, (20,) * 512):
        _, step = make_step(Case(lens=lens))
        cuda_backend.paged_attention(step.q, step.kv, step.cache, step.meta, **step.options)
    decode = [grid for grid in grids if grid[2] > 1]
    assert decode[0] == decode[1] == (2, 64, 8)
    assert decode[2] == (2, 3, 512)


def test_a_broken_row_stays_broken_and_alone(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(BF16, BF16, 128, 4, lens=(40, 50, 700), multiprocessors=4)
    _, step = make_step(case)
    step.q[1] = torch.nan
    out = attend(machine, case, step, monkeypatch)
    assert bool(out[1].isnan().all())
    assert bool(out[0].isfinite().all())
    assert bool(out[2].isfinite().all())


def test_rows_of_a_wider_tensor(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries as a part of merged query, key and value rows: read where they are."""
    case = Case(BF16, BF16, 128, 4)
    plain, step = make_step(case)
    expected = reference.paged_attention(plain.q, plain.kv, plain.cache, plain.meta, **plain.options)
    wide = torch.zeros(len(case.lens), 12, 128, dtype=BF16)
    wide[:, :8] = step.q
    step.q = wide[:, :8]
    assert error_of(case, expected, attend(machine, case, step, monkeypatch)) < TOLERANCE[BF16]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("dtype", "kv_dtype"), WRITES)
def test_writes_the_slots_and_nothing_else(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, machine: Any
) -> None:
    num_tokens, num_kv_heads, size, num_blocks = 13, 3, 8, 6
    generator = torch.Generator().manual_seed(head_dim)
    kv = 100 * torch.randn(num_tokens, 2, num_kv_heads, head_dim, generator=generator)
    kv *= 10.0 ** torch.randint(-6, 1, kv.shape, generator=generator)  # below the normal numbers of FP8 too
    kv[0, 0, 0, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 460.0])
    kv[1, 1, 2, :4] = torch.tensor([-1000.0, 448.0, 0.0009765625, 0.00146484375])  # half-way between two FP8 numbers
    kv = kv.to(dtype)
    slots = torch.randperm(num_blocks * size, generator=generator)[:num_tokens]
    before = torch.randn(num_blocks, 2, num_kv_heads, size, head_dim, generator=generator).to(kv_dtype)
    expected = before.clone()
    finite = torch.nan_to_num(kv.float(), nan=0.0, posinf=0.0, neginf=0.0)
    if kv_dtype == FP8:
        finite = finite.clamp(-448, 448)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // size, :, :, slot % size] = finite[token].to(kv_dtype)
    cache = before.to(DEVICE)
    machine.readable = cache
    meta = AttnMeta([num_tokens], [num_tokens], torch.zeros(1, 1, dtype=torch.int32), slots.to(DEVICE), size)
    cuda_backend.write_kv(kv.to(DEVICE), cache, meta)
    bits = torch.uint8 if kv_dtype == FP8 else torch.int32 if kv_dtype == FULL else torch.int16
    assert torch.equal(cache.cpu().view(bits), expected.view(bits))


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"head_dim": 80}, "no kernel for 2 heads of 80"),
        ({"group": 17}, "no kernel for 34 heads"),
        ({"block_size": 4}, "blocks of 4 tokens"),
        ({"dtype": HALF, "kv_dtype": BF16}, "no kernel for float16 with a cache of bfloat16"),
        ({"dtype": torch.float64, "kv_dtype": torch.float64}, "no kernel for float64"),
    ],
)
def test_what_the_kernels_cannot_do_is_an_error(patch: dict[str, Any], message: str) -> None:
    _, step = make_step(Case(lens=(3,), **patch))
    with pytest.raises(ValueError, match=message):
        cuda_backend.paged_attention(step.q, step.kv, step.cache, step.meta, **step.options)


def test_wrong_layouts_are_errors() -> None:
    _, step = make_step(Case(lens=(3,)))
    with pytest.raises(ValueError, match="contiguous"):
        cuda_backend.write_kv(step.kv, step.cache.transpose(3, 4).contiguous().transpose(3, 4), step.meta)
    with pytest.raises(ValueError, match="int64"):
        cuda_backend.write_kv(step.kv, step.cache, replace(step.meta, slots=step.meta.slots.int()))
    _, step = make_step(Case(lens=(3,), tables="slots"))
    with pytest.raises(ValueError, match="int32"):
        cuda_backend.paged_attention(
            step.q, step.kv, step.cache, replace(step.meta, block_table=step.meta.block_table.long()), **step.options
        )


@pytest.mark.skipif(not ON_DEVICE, reason="no CUDA device")
def test_a_captured_step_reads_its_lengths_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(BF16, BF16, 128, 4, lens=(700, 600, 900), tables="slots", multiprocessors=4)
    plain, step = make_step(case)
    step = step.to(DEVICE)
    monkeypatch.setattr(cuda_driver, "num_multiprocessors", lambda device: case.multiprocessors)

    def run() -> Tensor:
        return cuda_backend.paged_attention(step.q, step.kv, step.cache, step.meta, **step.options)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lens in ([700, 600, 900], [1, 33, 512]):
        assert step.meta.device_lens is not None
        step.meta.device_lens.kv_lens.copy_(torch.tensor(lens))
        graph.replay()
        expected = reference.paged_attention(
            plain.q, plain.kv, plain.cache, replace(plain.meta, kv_lens=lens), **plain.options
        )
        assert error_of(case, expected, out.cpu()) < TOLERANCE[BF16]


@pytest.mark.parametrize("tables", ["lists", "slots"])
def test_steps_with_prompts_go_to_another_backend(tables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "_other_backend", lambda: gather)
    plain, step = make_step(Case(lens=(20, 40), tables=tables))
    queries = torch.randn(6, *step.q.shape[1:])
    places = [(0, position) for position in range(15, 20)] + [(1, 39)]
    kv = torch.stack([plain.cache[plain.meta.block_table[row, at // 16], :, :, at % 16] for row, at in places])
    lens = {"query_lens": [5, 1], "kv_lens": [20, 40]}
    expected = reference.paged_attention(queries, kv, plain.cache, replace(plain.meta, **lens), **plain.options)
    meta = replace(step.meta, **lens, plans={})
    for _ in range(2):  # the second layer of a step finds what the first worked out
        actual = cuda_backend.paged_attention(queries, kv, step.cache, meta, **step.options)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_the_other_backend_is_tritons_where_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = importlib.util.find_spec("triton")
    assert cuda_backend._other_backend().__name__.split(".")[-1] == ("triton_backend" if triton else "gather")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cuda_backend._other_backend() is gather


def test_the_structures_are_as_large_on_both_sides(shim: Any) -> None:
    assert shim.library.shim_params_bytes(0) == ctypes.sizeof(cuda_backend.DecodeParams)
    assert shim.library.shim_params_bytes(1) == ctypes.sizeof(cuda_backend.WriteParams)
    assert shim.library.shim_shared_bytes() == cuda_backend._SHARED_BYTES
    assert [shim.library.shim_threads(of_write) for of_write in (0, 1)] == [
        cuda_backend._THREADS,
        cuda_backend._WRITE_THREADS,
    ]
