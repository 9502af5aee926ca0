"""Parts are fused by what their forward is, not by what it gives on a few tokens."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, WINDOW, build, use_gather
from torch import nn

from batchjob.engine.model.attention_hook import ATTENTION_NAME, StepContext, register
from batchjob.engine.model.fused import PagedAttention
from batchjob.engine.model.known_forwards import definition, known_activation, known_form
from batchjob.engine.model.length_check import first_positions, short_windows
from batchjob.engine.model.load import LoadedModel, packed_forward, prepare_model
from batchjob.engine.model.load_check import check_layers, packed_logits
from batchjob.engine.model.packed_linear import can_pack
from batchjob.errors import UnsupportedModelError
from batchjob_kernels.attention import gather
from batchjob_kernels.ops import reference as reference_ops

LLAMA: dict[str, Any] = FAMILIES["llama"][1]
packs = pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="this PyTorch cannot pack linear layers")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_model(config_name: str, **values: Any) -> Any:
    register()
    model = build(config_name, {**LLAMA, **values})
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def prepared(config_name: str, **values: Any) -> LoadedModel:
    model = prepare_model(
        random_model(config_name, **values), max_model_len=256, choose_backend=use_gather, block_size=4
    )
    assert model is not None
    return model


@pytest.mark.parametrize(
    ("family", "forms"),
    [
        ("llama.Llama", "attention gated_mlp rms_norm pre_norm_layer"),
        ("mistral.Mistral", "attention gated_mlp rms_norm pre_norm_layer"),
        ("qwen2.Qwen2", "attention gated_mlp rms_norm pre_norm_layer"),
        ("qwen3.Qwen3", "attention gated_mlp rms_norm pre_norm_layer"),
        ("qwen3_moe.Qwen3Moe", "attention gated_mlp rms_norm pre_norm_layer"),
        ("granite.Granite", "attention gated_mlp rms_norm None"),
        ("gemma2.Gemma2", "attention gated_mlp offset_rms_norm sandwich_layer"),
        ("gemma3.Gemma3", "attention gated_mlp offset_rms_norm sandwich_layer"),
        ("phi3.Phi3", "merged_attention merged_gated_mlp rms_norm pre_norm_layer"),
        ("gpt_oss.GptOss", "half_angle_attention None rms_norm pre_norm_layer"),
        ("ministral3.Ministral3", "scaled_attention gated_mlp rms_norm pre_norm_layer"),
    ],
)
def test_the_installed_transformers_has_the_definitions_that_are_known(family: str, forms: str) -> None:
    """Where this fails, a new version has changed a definition: read it, and add its hash if it means the same."""
    from batchjob.engine.model.known_forwards import FORMS

    module_name, prefix = family.split(".")
    module = import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    found = []
    for suffix in ("Attention", "MLP", "RMSNorm", "DecoderLayer"):
        form = FORMS.get(definition(getattr(module, prefix + suffix)) or "")
        found.append(form.name if form else "None")
    assert " ".join(found) == forms


def test_text_without_an_effect_does_not_matter_and_any_other_does() -> None:
    class One(nn.Module):
        def forward(self, x: Any, cache: Any = None, **kwargs: Any) -> Any:
            """Doubles."""
            if cache is not None:
                x = cache.update(x)
            return self.twice(x, cache=cache)

        def twice(self, x: Any) -> Any:
            return 2 * x

    class Same(nn.Module):
        def forward(self, x, past_key_values=None, **kwargs):  # type: ignore[no-untyped-def]
            return self.twice(x, past_key_values=past_key_values)  # a comment

        def twice(self, x):  # type: ignore[no-untyped-def]
            return 2 * x

    class Other(nn.Module):
        def forward(self, x: Any, cache: Any = None, **kwargs: Any) -> Any:
            return self.twice(x, cache=cache)

        def twice(self, x: Any) -> Any:
            return 2 * x.clamp(max=50)

    assert definition(One) == definition(Same) is not None
    assert definition(One) != definition(Other)


def test_a_part_with_another_forward_put_into_it_is_not_known() -> None:
    layer = random_model("LlamaConfig").model.layers[0]
    assert known_form(layer.mlp) == "gated_mlp"
    layer.mlp.forward = lambda x: x
    assert known_form(layer.mlp) is None


def test_activations_are_known_by_their_formula() -> None:
    from transformers.activations import ACT2FN

    known = {
        name: known_activation(ACT2FN[name]) for name in ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh")
    }
    assert known == {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
    for name in ("gelu_10", "quick_gelu", "relu", "relu2", "gelu_fast"):
        assert known_activation(ACT2FN[name]) is None


@packs
@pytest.mark.parametrize(
    ("config_name", "values", "kind", "count"),
    [
        ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh"}, "MLPs", 3),
        ("LlamaConfig", {"hidden_act": "gelu_10"}, "MLPs", 0),
        ("OlmoConfig", {}, "attentions", 3),
        ("OlmoConfig", {"clip_qkv": 1e4}, "attentions", 0),  # far beyond what any token of the check reaches
        ("SmolLM3Config", {"num_hidden_layers": 4}, "attentions", 3),  # the fourth has no rotary embedding
    ],
)
def test_what_no_token_of_the_check_reaches_is_not_fused_away(
    config_name: str, values: dict[str, Any], kind: str, count: int
) -> None:
    assert prepared(config_name, **values).fused[kind] == count


def ministral(**more: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
    scale = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0}
    return {"rope_parameters": {**rope, **scale}, **more}


@pytest.mark.parametrize("ops", [pytest.param(None, marks=packs), reference_ops], ids=["cpu", "gpu"])
def test_queries_that_are_scaled_by_position_are_in_fused_layers_too(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(**more: Any) -> LoadedModel | None:
        model = random_model("Ministral3Config", **ministral())
        return prepare_model(model, max_model_len=256, choose_backend=use_gather, block_size=4, **more)

    fused, plain = prepare(ops=ops), prepare(use_fused=False)
    assert fused is not None
    assert plain is not None
    assert fused.fused["layers"] == 3
    for start in (0, 20, 31, 100, 200):
        ours, theirs = (
            torch.cat(packed_logits(model.module, model.shapes, gather, packed_forward, first_position=start))
            for model in (fused, plain)
        )
        torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)
    monkeypatch.setattr(StepContext, "query_scale", lambda *_: torch.ones(1))
    assert prepare(ops=ops) is None, "the check reaches past the original length"


@packs
def test_a_fused_part_that_forgets_its_window_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the window is: here no token of the check reaches it."""
    values = {**LLAMA, "sliding_window": 200}
    model = random_model("MistralConfig", **values)
    assert prepare_model(model, max_model_len=256, choose_backend=use_gather, block_size=4) is not None
    built = PagedAttention.__init__

    def forgetful(self: Any, *args: Any, **more: Any) -> None:
        built(self, *args, **more)
        self.window = None

    monkeypatch.setattr(PagedAttention, "__init__", forgetful)
    model = random_model("MistralConfig", **values)
    assert prepare_model(model, max_model_len=256, choose_backend=use_gather, block_size=4) is None


def test_the_check_looks_around_every_length_that_the_configuration_names() -> None:
    config = random_model("Ministral3Config", **ministral(sliding_window=100)).config
    assert first_positions(config, 256) == [0, 21, 89, 233]
    assert first_positions(config, 64) == [0, 21, 41]
    assert first_positions(config, 20) == [0]


def test_a_model_that_changes_beyond_a_length_without_telling_its_attention_is_refused() -> None:
    model = random_model("Ministral3Config", **ministral())
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        # As if positions did not reach it: what a fused part would do that knows nothing of the scale.
        layer.self_attn.forward = lambda *args, step=None, forward=forward, position_ids=None, **kwargs: forward(
            *args, step=step, position_ids=position_ids * 0 if step is not None else position_ids, **kwargs
        )
    with pytest.raises(UnsupportedModelError, match="at positions from 21 on; set --max-model-len to at most 21"):
        prepare_model(model, max_model_len=256, choose_backend=use_gather, block_size=4)


def test_windows_that_the_model_does_not_use_are_found_however_long_they_are() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2}
    assert prepared("OlmoeConfig", **moe)
    with pytest.raises(UnsupportedModelError, match=r"set sliding_window to null in its config.json"):
        prepared("OlmoeConfig", **moe, sliding_window=200)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen2_window", "gpt_oss", "phi3"])
def test_windows_are_short_for_the_check_and_as_they_were_afterwards(name: str) -> None:
    config_name, values = FAMILIES[name]
    model = random_model(config_name, **{**values, "sliding_window": 90})
    calls = check_layers(model, packed_forward)
    with short_windows(model, {call.window for call in calls if call.window is not None}) as has_windows:
        assert has_windows
        assert {call.window for call in check_layers(model, packed_forward)} <= {WINDOW, None}
    after = check_layers(model, packed_forward)
    assert [call.window for call in after] == [call.window for call in calls]
    assert 90 in {call.window for call in after}


def test_a_helper_that_was_swapped_makes_a_definition_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    rotate: Any = modeling_llama.apply_rotary_pos_emb
    attention = modeling_llama.LlamaAttention
    before = definition(attention)

    def half(x: Any) -> Any:
        return -x

    def wrapped(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return rotate(q, k, cos, 2 * sin)

    wrapped.__wrapped__ = rotate  # type: ignore[attr-defined]
    found = set()
    for name, helper in (("rotate_half", half), ("apply_rotary_pos_emb", wrapped)):
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama, name, helper)
            definition.cache_clear()
            found.add(definition(attention))
    definition.cache_clear()
    assert definition(attention) == before
    assert before not in found
    assert None in found, "a wrapper of another package may do anything"


def test_a_part_with_a_hook_is_not_known() -> None:
    layer = random_model("LlamaConfig").eval().model.layers[0]
    assert known_form(layer.mlp) == "gated_mlp"
    layer.mlp.register_forward_hook(lambda *_: None)
    assert known_form(layer.mlp) is None


@packs
@pytest.mark.parametrize(
    ("config_name", "values", "left"),
    [
        ("LlamaConfig", {}, ()),
        ("LlamaConfig", {"hidden_act": "gelu_10"}, ("LlamaMLP",)),
        ("ApertusConfig", {"hidden_act": "xielu"}, ("ApertusMLP",)),
        ("OlmoConfig", {"clip_qkv": 1e4}, ("OlmoAttention",)),
    ],
)
def test_the_user_is_told_what_runs_without_fused_layers(
    config_name: str, values: dict[str, Any], left: tuple[str, ...]
) -> None:
    assert prepared(config_name, **values).unfused == left


def test_lengths_are_found_wherever_a_configuration_has_them() -> None:
    config = SimpleNamespace(
        to_dict=lambda: {
            "id2label": {0: 70, 1: "LABEL"},
            "window_sizes": [40, None, 60],
            "rope": {"original_max_position_embeddings": 80.0},
            "max_window_layers": True,
            "hidden_size": 90,
        }
    )
    assert first_positions(config, 200) == [0, 29, 49, 69, 177]
