"""The choice of a backend, and the reasons of those that refuse. `flash` with PyTorch's function played in PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchjob.spec import ATTENTION_BACKENDS
from batchjob_kernels import AttnMeta, DeviceLens, Requirements
from batchjob_kernels.attention import flash, reference
from batchjob_kernels.attention.select import BACKENDS, backend, select
from batchjob_kernels.triton_kernels import available

CPU = Requirements(
    device=torch.device("cpu"),
    capability=None,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    head_dims=frozenset({64}),
    group_sizes=frozenset({4}),
    block_size=16,
)
H200 = replace(
    CPU,
    device=torch.device("cuda", 0),
    capability=(9, 0),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    block_size=256,
)


def test_the_first_that_does_not_refuse_is_taken() -> None:
    selection = select("auto", CPU)
    assert (selection.name, selection.module) == ("gather", backend("gather"))
    assert selection.reason == "the first choice on cpu"


def test_what_was_passed_over_is_named_with_its_reason() -> None:
    selection = select("auto", replace(CPU, deterministic=True))
    assert selection.name == "invariant"
    assert selection.reason.startswith("not gather: its products have other shapes")
    selection = select("auto", replace(CPU, kv_dtype=torch.float8_e4m3fn))
    assert selection.name == "invariant"
    assert "not gather: it reads keys and values of the queries' type only" in selection.reason


def test_a_gpu_without_a_compiler_for_triton_still_has_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "problem", lambda device: "no C compiler")
    need = replace(H200, block_size=16)
    assert select("auto", need).name == "gather"
    assert "not triton: no C compiler" in select("auto", need).reason
    assert select("auto", replace(need, deterministic=True)).name == "invariant"


def test_a_backend_that_cannot_be_used_says_why() -> None:
    with pytest.raises(ValueError, match="'flash' cannot be used: varlen_attn runs on CUDA devices only"):
        select("flash", CPU)
    with pytest.raises(ValueError, match="no attention backend 'warp': choose one of triton, flash"):
        select("warp", CPU)


def test_the_flag_names_every_backend() -> None:
    """The table of flags loads no torch, so it has the names once more."""
    assert ATTENTION_BACKENDS == BACKENDS


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_is_a_whole_one(name: str) -> None:
    module = backend(name)
    assert callable(module.write_kv)
    assert callable(module.paged_attention)
    assert isinstance(module.USES_DEVICE_LENS, bool)
    assert isinstance(module.COMPILED_FOR_BLOCK_SIZE, bool)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_answers_for_any_need(name: str) -> None:
    for need in (CPU, replace(CPU, softcap=True, sinks=True, windows=True), replace(CPU, head_dims=frozenset({40}))):
        answer = backend(name).refusal(need)
        assert answer is None or len(answer) > 10


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": (7, 5)}, "needs compute capability 8.0; this device has 7.5"),
        ({"softcap": True}, "no soft-cap and no sinks"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "float16 and bfloat16, not in torch.float32"),
        ({"kv_dtype": torch.float8_e4m3fn}, "of the queries' type only"),
        ({"block_size": 16}, "needs --block-size of a multiple of 256, not 16"),
        ({"deterministic": True}, "not proven"),
    ],
)
def test_the_conditions_of_flash(change: dict[str, Any], reason: str) -> None:
    assert reason in (flash.refusal(replace(H200, **change)) or "")


def test_flash_is_not_used_where_pytorch_has_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_varlen", lambda: lambda query, key, value, *, scale: query)
    assert "lacks block_table, enable_gqa, num_splits" in (flash.refusal(H200) or "")


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """What PyTorch documents: causal from the bottom right, `window_size[0]` keys to the left of the query's own."""
    assert enable_gqa
    assert num_splits == 1
    assert window_size[1] == 0
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    out = torch.empty_like(query)
    for row, (start, stop) in enumerate(zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False)):
        length = int(seqused_k[row])
        assert stop - start <= max_q
        assert length <= max_k
        keys, values = (
            pages[block_table[row].long()]
            .flatten(0, 1)[:length]
            .repeat_interleave(query.shape[1] // key.shape[2], dim=1)
            for pages in (key, value)
        )
        position = torch.arange(length - (stop - start), length)[:, None]
        other = torch.arange(length)
        hidden = other > position
        if window_size[0] >= 0:
            hidden |= other < position - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), keys.float()) * scale
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=2)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(query.dtype)
    return out


@pytest.fixture
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_varlen", lambda: varlen_attn)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("on_device", [False, True], ids=["lists", "device lens"])
def test_flash_asks_for_what_the_reference_computes(window: int | None, on_device: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query_lens, kv_lens, size = [1, 6, 1], [9, 14, 4], 4
    table = torch.randperm(30, generator=generator).view(5, 6)
    rows = torch.tensor([4, 0, 2])
    cache = torch.randn(31, 2, 2, size, 16, generator=generator).to(torch.bfloat16)
    q = torch.randn(sum(query_lens), 6, 16, generator=generator).to(torch.bfloat16)
    slot_mapping = torch.zeros(len(q), dtype=torch.int64)
    plain = AttnMeta(query_lens, kv_lens, table[rows], slot_mapping, size)
    meta = plain
    if on_device:
        lens = DeviceLens(
            torch.tensor([0, 1, 7, 8], dtype=torch.int32), torch.tensor(kv_lens, dtype=torch.int32), rows.int()
        )
        meta = AttnMeta(query_lens, [1, 1, 1], table.int(), slot_mapping, size, device_lens=lens)
    actual = flash.paged_attention(q, None, cache, meta, scale=0.25, window=window)
    expected = reference.paged_attention(q, None, cache, plain, scale=0.25, window=window)
    torch.testing.assert_close(actual, expected)


def self_test() -> str | None:
    flash._self_test.cache_clear()
    return flash._self_test(torch.device("cpu"), torch.bfloat16, 64, 4, 256, True)


@pytest.mark.usefixtures("_played")
def test_the_start_up_test_passes_a_right_function() -> None:
    assert self_test() is None


def test_the_start_up_test_finds_rows_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritten(*args: Any, **kwargs: Any) -> Tensor:
        out = varlen_attn(*args, **kwargs)
        out[-1] = 0
        return out

    monkeypatch.setattr(flash, "_varlen", lambda: unwritten)
    assert "differs from the reference" in (self_test() or "")


def test_the_start_up_test_survives_a_function_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("page size must be a multiple of 512\nmore")

    monkeypatch.setattr(flash, "_varlen", lambda: fails)
    assert self_test() == "varlen_attn failed its start-up test: page size must be a multiple of 512"
