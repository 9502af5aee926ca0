"""The fused parts with plain products, as on a GPU, on a CPU with the reference operations: which families get them,
that they give what the originals gave in float32 and bfloat16, and that the originals are let go."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, FUSED_PARTS, build, use_gather
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from batchjob.engine.kv_cache import LayerShape
from batchjob.engine.model.attention_hook import ATTENTION_NAME, register
from batchjob.engine.model.fuse import fuse
from batchjob.engine.model.fused import GatedMLP, PagedAttention
from batchjob.engine.model.load import LoadedModel, packed_forward, prepare_model
from batchjob.engine.model.load_check import check_layers, packed_logits
from batchjob_kernels.attention import gather, reference
from batchjob_kernels.ops import reference as reference_ops


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def injected(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    register()
    model = build(*FAMILIES[family], **more).to(dtype).requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def prepare(model: Any, **more: Any) -> LoadedModel:
    prepared = prepare_model(model, max_model_len=64, choose_backend=use_gather, block_size=4, **more)
    assert prepared is not None
    return prepared


def logits(model: LoadedModel, backend: Any = gather) -> list[Tensor]:
    return packed_logits(model.module, model.shapes, backend, packed_forward)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_models_equal_themselves_unfused(family: str) -> None:
    plain = prepare(injected(family), use_fused=False)
    fused = prepare(injected(family), ops=reference_ops)
    assert tuple(fused.fused[kind] for kind in ("attentions", "MLPs", "layers")) == FUSED_PARTS[family]
    expected = logits(plain)
    for backend in (gather, reference):
        for ours, theirs in zip(logits(fused, backend), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)


WITH_16_BITS = [(torch.bfloat16, family) for family in FAMILIES if any(FUSED_PARTS[family])]
WITH_16_BITS += [(torch.float16, family) for family in ("qwen3", "gemma3", "gpt_oss")]


@pytest.mark.parametrize(("dtype", "family"), WITH_16_BITS, ids=str)
def test_the_same_parts_are_kept_with_16_bits(dtype: torch.dtype, family: str) -> None:
    module, twin = injected(family, dtype), injected(family, dtype).float()
    exact, plain = logits_of(twin), logits_of(module)
    assert fused_counts(module) == FUSED_PARTS[family]
    fused = logits_of(module)
    assert distance(fused, exact) <= 1.5 * distance(plain, exact), "as far from float32 as the model itself"


def logits_of(module: nn.Module) -> Tensor:
    """Logits of the module as it is, all test tokens below each other."""
    return torch.cat(packed_logits(module, shapes(module), gather, packed_forward)).float()


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).square().mean().sqrt())


def shapes(module: nn.Module) -> list[LayerShape]:
    config: Any = module.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [LayerShape(config.num_key_value_heads, dim)] * config.num_hidden_layers


def fused_counts(module: nn.Module) -> tuple[int, ...]:
    calls = check_layers(module, packed_forward)
    done = fuse(module, calls, lambda: packed_logits(module, shapes(module), gather, packed_forward), ops=reference_ops)
    return tuple(done[kind] for kind in ("attentions", "MLPs", "layers"))


def test_the_operations_of_triton_give_the_same_model() -> None:
    pytest.importorskip("triton")
    from batchjob_kernels.ops import triton as triton_ops

    module = injected("llama", num_hidden_layers=1)
    expected = logits_of(module)
    calls = check_layers(module, packed_forward)
    assert fuse(module, calls, lambda: logits_of(module), ops=triton_ops)["layers"] == 1
    torch.testing.assert_close(logits_of(module), expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


def test_a_layer_of_llama_is_nine_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    quiet = False

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal quiet
            launches.append(name)
            quiet = True
            try:
                return function(*args, **kwargs)
            finally:
                quiet = False

        return call

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not quiet and not function.is_view:
                launches.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    names = ("rms_norm", "add_rms_norm", "act_and_mul", "rotary_write")
    operations = {name: counted(name, getattr(reference_ops, name)) for name in names}
    ops: Any = SimpleNamespace(**operations, head_order=reference_ops.head_order)
    module: Any = injected("llama")
    assert fuse(module, check_layers(module, packed_forward), lambda: logits_of(module), ops=ops)["layers"] == 3
    layer, forward = module.model.layers[1], module.model.layers[1].forward
    monkeypatch.setattr(gather, "paged_attention", counted("attention", gather.paged_attention))

    def watched(*args: Any, **kwargs: Any) -> Any:
        launches.clear()
        with Watch():
            return forward(*args, **kwargs)

    layer.forward = watched
    module.model.layers[2].forward = lambda x, **_: (seen.append(list(launches)), x)[1]
    seen: list[list[str]] = []
    logits_of(module)
    assert len(seen) == 3, "steps"
    for found in seen:
        products = [name for name in found if name in ("linear", "mm", "addmm_")]
        assert [name for name in found if name not in products] == [
            "rms_norm",
            "rotary_write",
            "attention",
            "rms_norm",
            "act_and_mul",
        ]
        assert len(products) == 4
        assert len(found) == 9


def test_originals_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = injected("llama_biased")
    size = sum(parameter.numel() for parameter in module.parameters())
    originals = [weakref.ref(layer.self_attn.q_proj.weight) for layer in module.model.layers]
    alive: list[int] = []
    build_attention = PagedAttention.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        gc.collect()
        alive.append(sum(original() is not None for original in originals))
        build_attention(self, *args, **kwargs)

    monkeypatch.setattr(PagedAttention, "__init__", built)
    calls = check_layers(module, packed_forward)
    done = fuse(module, calls, lambda: logits_of(module), ops=reference_ops)
    assert done["attentions"] == 3
    assert calls == []
    assert alive == sorted(alive, reverse=True)
    assert {3, 2, 1} <= set(alive), "each goes before the next one is merged"
    gc.collect()
    assert all(original() is None for original in originals)
    assert sum(parameter.numel() for parameter in module.parameters()) == size


def test_a_part_that_does_something_else_is_left_as_it_is() -> None:
    model: Any = injected("llama")

    class Scaled(type(model.model.layers[1].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 1.01 * super().forward(x)

    model.model.layers[1].mlp.__class__ = Scaled
    fused = prepare(model, ops=reference_ops)
    assert [type(layer.mlp) for layer in fused.module.model.layers] == [
        GatedMLP,
        Scaled,
        GatedMLP,
    ]
    assert fused.fused["layers"] == 3, "a layer takes an MLP of any kind"


def test_a_layer_is_not_judged_by_what_its_experts_choose() -> None:
    """Experts that answer otherwise when asked again, as a router does that is between two of them."""
    model: Any = injected("llama")

    class Fickle(nn.Module):
        asked = 0

        def forward(self, x: Tensor) -> Tensor:
            self.asked += 1
            return x * (1 if self.asked % 2 else -1)

    for layer in model.model.layers:
        layer.mlp = Fickle()
    assert fused_counts(model) == (3, 0, 3)
    assert all(isinstance(layer.mlp, Fickle) for layer in model.model.layers)


def test_a_layer_that_gives_its_experts_something_else_is_left_as_it_is() -> None:
    model: Any = injected("qwen3_moe")
    kind = type(model.model.layers[1])

    class Other(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, **more: Any) -> Tensor:
            return super().forward(1.01 * hidden_states, **more)

    model.model.layers[1].__class__ = Other
    assert fused_counts(model) == (3, 0, 2)
    assert type(model.model.layers[1]) is Other


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_nothing_is_done_where_no_set_serves_the_device(dtype: torch.dtype) -> None:
    model = injected("llama", dtype)
    calls = check_layers(model, packed_forward)
    ops = reference_ops if dtype == torch.float64 else None
    assert fuse(model, calls, lambda: logits_of(model), ops=ops) == {}


def test_more_dimensions_than_a_head_has_cannot_be_rotated() -> None:
    pytest.importorskip("triton")
    from batchjob_kernels import AttnMeta
    from batchjob_kernels.ops import triton as triton_ops

    meta = AttnMeta([1], [1], torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 4)
    angles = torch.zeros(1, 16)
    with pytest.raises(ValueError, match="32 rotated dimensions of 16"):
        triton_ops.rotary_write(
            torch.zeros(1, 3, 16), angles, angles, torch.zeros(1, 2, 1, 4, 16), meta, num_heads=1, rotary_dim=32
        )
