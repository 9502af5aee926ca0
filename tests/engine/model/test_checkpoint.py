"""A load gives the checkpoint, all of it and nothing else, or the load is refused with the names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build, save
from safetensors.torch import load_file, save_file

from batchjob.engine.model.checkpoint import _number_problem, check_checkpoint, load_config, load_module, report_problem
from batchjob.errors import EngineError, UnsupportedModelError
from batchjob.models.weights import TensorPlace

Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"
LLAMA: dict[str, Any] = {**FAMILIES["llama"][1], "tie_word_embeddings": False}


def load(path: Path) -> torch.nn.Module:
    return load_module(path, load_config(path), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("sound") / "llama", "LlamaConfig", LLAMA)


@pytest.fixture
def changed(sound: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], Any]], Path]:
    def change(edit: Callable[[Tensors], Any]) -> Path:
        path = tmp_path / "model"
        shutil.copytree(sound, path)
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    return change


def add_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.replace("model.", "base.")] = tensors.pop(name)


def as_classifier(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.zeros(3, 32)


def as_int8(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].to(torch.int8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), r"1 tensor is missing \(lm_head.weight\)"),
        (lambda tensors: tensors.pop(UP), rf"1 tensor is missing \({UP}\)"),
        (lambda tensors: tensors.pop("model.norm.weight"), r"missing \(model.norm.weight\)"),
        (add_prefix, r"29 tensors are missing .* and 26 more\); 29 tensors are left over \(base\."),
        (as_classifier, r"missing \(lm_head.weight\); 1 tensor is left over \(score.weight\)"),
        (lambda tensors: tensors.update({UP: torch.zeros(40, 32)}), rf"another shape \({UP} \[40, 32\] instead of"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.extra": torch.zeros(1)}), r"left over \(model.*extra\)"),
        (as_int8, rf"{UP} I8"),
    ],
    ids=["no head", "no projection", "no norm", "prefix", "classifier", "shape", "extra", "int8"],
)
def test_a_checkpoint_that_is_not_the_model_is_refused_with_the_names(
    changed: Any, edit: Callable[[Tensors], Any], message: str
) -> None:
    path = changed(edit)
    for refuse in (load, check_checkpoint):
        with pytest.raises(UnsupportedModelError, match=message):
            refuse(path)


def test_it_is_said_what_the_checkpoint_is_for(changed: Any) -> None:
    path = changed(as_classifier)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="it is for LlamaForSequenceClassification"):
        load(path)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_loads_whole_and_without_a_tensor_not_at_all(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / name, *FAMILIES[name])
    expected = build(*FAMILIES[name]).state_dict()
    check_checkpoint(path)
    loaded = load(path).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())
    tensors = load_file(path / "model.safetensors")
    lost = sorted(tensors)[len(tensors) // 2]
    save_file({key: tensor for key, tensor in tensors.items() if key != lost}, path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"missing|of another shape \(.*experts"):
        check_checkpoint(path)


def test_what_old_versions_saved_beside_the_weights_is_passed_over(tmp_path: Path) -> None:
    path = save(tmp_path / "gpt2", *FAMILIES["gpt2"])
    expected = load(path).state_dict()
    tensors = load_file(path / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(3):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 256, 256).tril()
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, path / "model.safetensors", {"format": "pt"})
    check_checkpoint(path)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in load(path).state_dict().items())


def shard(path: Path, first: Tensors, second: Tensors, index: dict[str, str]) -> None:
    (path / "model.safetensors").unlink(missing_ok=True)
    for name, tensors in (("a.safetensors", first), ("b.safetensors", second)):
        save_file(tensors, path / name, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_an_index_that_does_not_tell_the_truth_is_refused(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    tensors = load_file(path / "model.safetensors")
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    index = {**dict.fromkeys(tensors, "a.safetensors"), "lm_head.weight": "b.safetensors"}
    shard(path, tensors, head, index)
    assert torch.equal(load(path).state_dict()["lm_head.weight"], head["lm_head.weight"])
    stale = {"lm_head.weight": torch.randn(96, 32)}
    shard(path, {**tensors, **stale}, head, index)
    with pytest.raises(UnsupportedModelError, match=r"lm_head.weight is both in a.safetensors and in b.safetensors"):
        load(path)
    shard(path, {**tensors, **head}, {"other": torch.zeros(1)}, index)
    with pytest.raises(UnsupportedModelError, match=r"lm_head.weight is in b.safetensors, but it is in a.safetensors"):
        load(path)
    shard(path, tensors, {"other": torch.zeros(1)}, index)
    with pytest.raises(UnsupportedModelError, match=r"in b.safetensors, but no file has it"):
        load(path)


def test_the_single_file_that_is_loaded_is_the_one_that_the_digest_covers(sound: Path, tmp_path: Path) -> None:
    from batchjob.models.weights import read_weights

    path = tmp_path / "model"
    shutil.copytree(sound, path)
    single = load_file(path / "model.safetensors")
    others = {name: torch.randn_like(tensor) for name, tensor in single.items()}
    shard(path, others, {"x": torch.zeros(1)}, dict.fromkeys(others, "a.safetensors"))
    shutil.copy(sound / "model.safetensors", path)
    assert torch.equal(load(path).state_dict()[UP], single[UP])
    before = read_weights(path, name="m")
    assert before.files == ("model.safetensors",)
    save_file({**single, UP: single[UP] + 1}, path / "model.safetensors", {"format": "pt"})
    assert read_weights(path, name="m").digest != before.digest
    assert torch.equal(load(path).state_dict()[UP], single[UP] + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_writes_into_the_file_does_not_change_a_loaded_model(
    dtype: torch.dtype, sound: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    module = load_module(path, load_config(path), dtype, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with (path / "model.safetensors").open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start)
        file.write(b"\x11" * ((path / "model.safetensors").stat().st_size - start))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_whole_numbers_are_the_models_own_where_it_has_them_under_another_prefix() -> None:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = torch.nn.Linear(2, 2)
            self.register_buffer("table", torch.zeros(4, dtype=torch.int64))

    places = {"model.ffn.gate.table": TensorPlace("a", "I64", (4,)), "model.norm.weight": TensorPlace("a", "F32", (4,))}
    assert _number_problem(Gate(), places) is None
    places["model.mlp.weight"] = TensorPlace("a", "I8", (2, 2))
    assert "model.mlp.weight I8" in str(_number_problem(Gate(), places))


def composite(path: Path) -> Path:
    """A Qwen 3.5 that also takes pictures; the causal language model is its text part."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**FAMILIES["qwen3"][1], "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config={**vision, "patch_size": 4, "num_position_embeddings": 4})
    Qwen3_5ForConditionalGeneration(config).save_pretrained(path)
    return path


def test_the_text_part_of_a_model_that_takes_pictures_is_loaded_whole(tmp_path: Path) -> None:
    path = composite(tmp_path / "model")
    check_checkpoint(path)
    tensors = load_file(path / "model.safetensors")
    loaded = load(path).state_dict()
    assert type(load(path)).__name__ == "Qwen3_5ForCausalLM"
    name = "layers.1.mlp.up_proj.weight"
    assert torch.equal(loaded[f"model.{name}"], tensors[f"model.language_model.{name}"])
    del tensors[f"model.language_model.{name}"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"1 tensor is missing \(model.{name}\)"):
        check_checkpoint(path)


def test_only_what_takes_pictures_may_be_left_over_beside_a_text_part() -> None:
    left = {"vision_model.class_embedding", "multi_modal_projector.bias", "model.visual.blocks.0.norm1.weight"}
    report: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": left, "mismatched_keys": set()}
    assert report_problem(report, is_part=True) is None
    assert "3 tensors are left over" in str(report_problem(report))
    assert "(score.weight)" in str(report_problem({**report, "unexpected_keys": {*left, "score.weight"}}, is_part=True))


def test_nothing_is_read_of_weights_whose_headers_are_wrong(changed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = changed(lambda tensors: tensors.pop(UP))
    monkeypatch.setattr(
        "batchjob.engine.model.checkpoint.safe_open", lambda *_, **__: pytest.fail("the weights are opened")
    )
    with pytest.raises(UnsupportedModelError, match="1 tensor is missing"):
        load(path)


@pytest.mark.parametrize("family", ["falcon", "gpt_neo", "git"])
def test_whatever_a_family_raises_while_it_is_built_is_one_line(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    more = {"gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}}
    config = AutoConfig.for_model(family, **{**small, **more.get(family, {})})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for refuse in (load, check_checkpoint):
        with pytest.raises(EngineError, match=rf"\A{family} models do not run here: [^\n]+\Z"):
            refuse(tmp_path)
