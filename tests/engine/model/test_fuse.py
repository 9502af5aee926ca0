"""Fused parts: which families get them, that they give what the originals gave, and that others stay as they are."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from families import FAMILIES, FUSED_PARTS, build, use_gather
from torch import Tensor, nn

from batchjob.engine.model.attention_hook import ATTENTION_NAME, register
from batchjob.engine.model.fuse import PackedLinear, pack_linear
from batchjob.engine.model.fused import GatedMLP, PagedAttention
from batchjob.engine.model.load import LoadedModel, packed_forward, prepare_model
from batchjob.engine.model.load_check import logits_problem, packed_logits
from batchjob.engine.model.packed_linear import POST_OPS, can_pack
from batchjob_kernels.attention import gather
from batchjob_kernels.ops.reference import ACTIVATIONS

pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="this PyTorch cannot pack linear layers")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prepare(model: Any, *, use_fused: bool = True) -> LoadedModel:
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    prepared = prepare_model(model, max_model_len=64, choose_backend=use_gather, block_size=4, use_fused=use_fused)
    assert prepared is not None
    return prepared


def logits(model: LoadedModel) -> list[Tensor]:
    return packed_logits(model.module, model.shapes, gather, packed_forward)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 64, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_linear_layer_equals_the_plain_one(num_rows: int, with_bias: bool) -> None:
    linear = nn.Linear(40, 24, bias=with_bias)
    packed = pack_linear(linear)
    assert packed is not None
    x = torch.randn(1, num_rows, 40)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), linear(x), atol=1e-5, rtol=1e-5)


def test_what_comes_after_the_product() -> None:
    linear = nn.Linear(40, 24)
    packed = pack_linear(linear)
    assert packed is not None
    x, other = torch.randn(9, 40), torch.randn(9, 24)
    with torch.inference_mode():
        for activation, name in POST_OPS.items():
            function = ACTIVATIONS[activation]
            torch.testing.assert_close(packed.activated(x, name), function(linear(x)), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.added(x, other), linear(x) + other, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.multiplied(x, other), linear(x) * other, atol=1e-5, rtol=1e-5)


def test_the_transposed_layer_of_gpt2_is_packed_and_other_modules_are_not() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(24, 40)
    packed = pack_linear(layer)
    assert packed is not None
    x = torch.randn(5, 40)
    torch.testing.assert_close(packed(x), layer(x), atol=1e-5, rtol=1e-5)
    assert pack_linear(nn.Embedding(4, 4)) is None
    assert pack_linear(nn.Linear(4, 4).to(torch.bfloat16)) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_models_equal_themselves_unfused(family: str) -> None:
    plain = prepare(build(*FAMILIES[family]), use_fused=False)
    fused = prepare(build(*FAMILIES[family]))
    assert tuple(fused.fused[kind] for kind in ("attentions", "MLPs", "layers")) == FUSED_PARTS[family]
    for expected, actual in zip(logits(plain), logits(fused), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    left = [path for path, part in fused.module.named_modules() if pack_linear(part) is not None]
    assert left == [], "every linear layer is packed"


def test_originals_are_let_go() -> None:
    model = build(*FAMILIES["llama"])
    originals = [weakref.ref(part) for part in model.modules() if type(part) is nn.Linear]
    prepared = prepare(model)
    gc.collect()
    assert prepared.fused["layers"] == 3
    assert all(original() is None for original in originals)


def test_a_part_that_does_something_else_is_left_as_it_is() -> None:
    model = build(*FAMILIES["llama"])

    class Scaled(type(model.model.layers[1].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 1.01 * super().forward(x)

    model.model.layers[1].mlp.__class__ = Scaled
    fused = prepare(model)
    assert [type(layer.mlp) for layer in fused.module.model.layers] == [GatedMLP, Scaled, GatedMLP]
    assert type(fused.module.model.layers[1].self_attn) is PagedAttention
    assert isinstance(fused.module.model.layers[1].mlp.down_proj, PackedLinear)


def test_a_model_that_reaches_into_a_replaced_part_runs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    model = build(*FAMILIES["llama"])
    inner = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        assert model.lm_head.weight is not None
        return inner(*args, **kwargs)

    model.model.forward = forward
    model.set_attn_implementation(ATTENTION_NAME)
    assert prepare_model(model, max_model_len=64, choose_backend=use_gather, block_size=4) is None


def test_other_logits_are_a_problem_also_where_they_are_not_numbers() -> None:
    good = [torch.ones(2, 3)]
    assert logits_problem(good, [torch.ones(2, 3) + 1e-5]) is None
    assert "other logits" in str(logits_problem(good, [torch.ones(2, 3) + 0.1]))
    assert "other logits" in str(logits_problem(good, [torch.full((2, 3), torch.nan)]))
