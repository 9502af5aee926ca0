"""The loader's refusals, and that it says by name what the model needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, build, save, use_gather
from torch import nn

from batchjob.engine.config import EngineConfig
from batchjob.engine.memory import largest_step
from batchjob.engine.model.attention_hook import StepContext, injected_attention
from batchjob.engine.model.load import LoadedModel, load_model, packed_forward, prepare_model
from batchjob.engine.model.load_check import packed_logits
from batchjob.engine.runner import TorchRunner
from batchjob.errors import EngineError, UnsupportedModelError
from batchjob_kernels import AttnMeta
from batchjob_kernels.attention import reference
from batchjob_kernels.attention.select import Selection


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prepare(model: Any, *, max_model_len: int = 64) -> LoadedModel | None:
    from batchjob.engine.model.attention_hook import ATTENTION_NAME, register

    register()
    model.set_attn_implementation(ATTENTION_NAME)
    return prepare_model(model, max_model_len=max_model_len, choose_backend=use_gather, block_size=4)


def rope(**values: Any) -> dict[str, Any]:
    return {**FAMILIES["llama"][1], "rope_parameters": {"rope_theta": 10000.0, **values}}


def longrope() -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    values = rope(rope_type="longrope", original_max_position_embeddings=32, factor=4.0, **factors)
    return {**values, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config_name", "values", "limit"),
    [
        ("LlamaConfig", {**rope(rope_type="dynamic", factor=2.0), "max_position_embeddings": 32}, 32),
        ("Phi3Config", longrope(), 32),
    ],
    ids=["dynamic", "longrope"],
)
def test_a_rotary_type_that_follows_the_longest_row_runs_only_up_to_its_original_length(
    config_name: str, values: dict[str, Any], limit: int
) -> None:
    kind = values["rope_parameters"]["rope_type"]
    assert prepare(build(config_name, values), max_model_len=limit) is not None
    with pytest.raises(UnsupportedModelError, match=f"rotary type '{kind}'.*--max-model-len to at most {limit}"):
        prepare(build(config_name, values), max_model_len=limit + 1)


def test_tokens_that_mix_outside_of_attention_are_found_by_the_self_test() -> None:
    class Mixing(nn.Module):
        def __init__(self, mlp: nn.Module) -> None:
            super().__init__()
            self.mlp = mlp

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x + 0.1 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    model = build(*FAMILIES["llama"])
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*mixes tokens outside of its attention"):
        prepare(model)


def test_a_window_that_the_attention_function_is_not_told_of_is_refused() -> None:
    model = build(*FAMILIES["qwen2_window"])
    model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM, layer 2: it has a sliding window"):
        prepare(model)


def test_a_soft_cap_that_the_attention_function_is_not_told_of_is_refused() -> None:
    model = build(*FAMILIES["gemma2"])
    model.model.layers[1].self_attn.attn_logit_softcapping = None
    with pytest.raises(UnsupportedModelError, match="Gemma2ForCausalLM, layer 1: it has a soft-cap"):
        prepare(model)


def test_attention_in_both_directions_is_refused() -> None:
    model = build(*FAMILIES["gemma3"])
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match="Gemma3ForCausalLM, layer 0: its attention is not causal"):
        prepare(model)


def test_unknown_keyword_arguments_of_the_attention_function_are_refused() -> None:
    module = nn.Module()
    q = torch.zeros(1, 2, 3, 4)
    step = StepContext()
    known = {"scaling": 0.5, "position_ids": torch.arange(3), "use_cache": False, "head_mask": None, "dropout": 0.0}
    injected_attention(module, q, q, q, None, step=step, **known)
    assert [call.scale for call in step.calls] == [0.5]
    for name, value in {"alibi_slopes": torch.ones(2), "cumulative": True, "dropout": 0.1}.items():
        with pytest.raises(UnsupportedModelError, match=f"Module wants attention with {name}, which is not supported"):
            injected_attention(module, q, q, q, None, step=step, **{name: value})
    with pytest.raises(UnsupportedModelError, match="attention_mask"):
        injected_attention(module, q, q, q, torch.zeros(3, 3), step=step)
    with pytest.raises(UnsupportedModelError, match="outside of a step"):
        injected_attention(module, q, q, q, None)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no configuration that Transformers can use"):
        TorchRunner(tmp_path, EngineConfig(max_model_len=64))


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(d_model=32, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="t5 models are no causal language models"):
        TorchRunner(tmp_path, EngineConfig(max_model_len=64))


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_weights_that_do_not_load_are_an_engine_error(damage: str, tmp_path: Path) -> None:
    path = save(tmp_path / "model", *FAMILIES["llama"])
    weights = path / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(EngineError, match="has no safetensors weights" if damage == "missing" else "interrupted"):
        TorchRunner(path, EngineConfig(max_model_len=64))


def test_loading_leaves_a_second_load_alone(tmp_path: Path) -> None:
    """Transformers writes the attention's name into configurations; ours must not reach another model."""
    from transformers import AutoModelForCausalLM

    path = save(tmp_path / "model", *FAMILIES["llama"])
    load_model(
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
        choose_backend=use_gather,
        block_size=4,
    )
    assert AutoModelForCausalLM.from_pretrained(path).config._attn_implementation == "sdpa"


def test_the_check_and_the_largest_step_give_a_backend_its_lengths_where_it_finds_them_in_a_job() -> None:
    """On the device or as lists: the kernels of some backends are compiled once more for the other way."""
    seen: list[bool] = []

    def paged_attention(q: torch.Tensor, kv: Any, cache: torch.Tensor, meta: AttnMeta, **more: Any) -> torch.Tensor:
        seen.append(meta.device_lens is not None)
        if meta.device_lens is not None:
            assert meta.block_table.dtype == meta.device_lens.table_rows.dtype == torch.int32
        return reference.paged_attention(q, kv, cache, meta, **more)

    backend: Any = SimpleNamespace(write_kv=reference.write_kv, paged_attention=paged_attention)
    model = prepare(build(*FAMILIES["llama"]))
    assert model is not None
    for name, has_device_lens in (("triton", True), ("gather", False)):
        backend.USES_DEVICE_LENS = has_device_lens
        model.backend = Selection(name, backend, "for the test")
        logits = [
            packed_logits(model.module, model.shapes, backend, packed_forward, 4, has_device_lens=on_device)
            for on_device in (True, False)
        ]
        for on_device, as_lists in zip(*logits, strict=True):
            torch.testing.assert_close(on_device, as_lists)
        seen.clear()
        config = EngineConfig(max_model_len=16, block_size=4)
        dtype, device = torch.float32, torch.device("cpu")
        largest_step(model, model.forward, 40, 8, config, kv_dtype=dtype, device=device)
        assert seen == [has_device_lens] * len(model.shapes)
