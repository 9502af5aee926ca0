"""The values of `--model`, and the errors for a model that cannot be used."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from batchjob.errors import StoppedEarlyError, UnsupportedModelError, UsageError
from batchjob.models import ignored_generation_settings, resolve_model, sampling_defaults

CONFIG = {"model_type": "llama", "max_position_embeddings": 128, "eos_token_id": 2, "dtype": "bfloat16"}


def write_safetensors(path: Path, tensors: dict[str, bytes], *, pad: bytes = b"") -> None:
    """A safetensors file of one-dimensional float32 tensors; `pad` is put behind the data."""
    header, position = {}, 0
    for name, content in tensors.items():
        end = position + len(content)
        header[name] = {"dtype": "F32", "shape": [len(content) // 4], "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()) + pad)


def make_model(directory: Path, *, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A model directory with one small weight file; `files` maps names (with `__` for `.`) to JSON content."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(json.dumps(content))
    write_safetensors(directory / "model.safetensors", {"a": bytes(range(64)) * 400, "b": b"\0" * 16})
    return directory


def test_a_directory_is_read_without_being_loaded(tmp_path: Path) -> None:
    info = resolve_model(str(make_model(tmp_path / "m")))
    assert (info.source, info.path, info.revision) == ("directory", str(tmp_path / "m"), None)
    assert (info.max_model_len, info.eos_token_ids, info.checkpoint_dtype) == (128, (2,), "bfloat16")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "m.gguf"]
)
def test_a_git_lfs_pointer_is_named_as_what_it_is(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path / "m")
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(UnsupportedModelError, match=r"Git LFS pointer.*git lfs pull"):
        resolve_model(str(model / name if name.endswith("gguf") else model))


def test_end_tokens_are_those_of_all_three_files_together(tmp_path: Path) -> None:
    model = make_model(
        tmp_path,
        config={"eos_token_id": [2, 3]},
        generation_config__json={"eos_token_id": [3, 7]},
        tokenizer_config__json={"eos_token": {"content": "<|end|>"}},
        tokenizer__json={"added_tokens": [{"id": 11, "content": "<|end|>"}], "model": {"vocab": {"a": 0}}},
    )
    assert resolve_model(str(model)).eos_token_ids == (2, 3, 7, 11)


def test_an_end_token_in_the_plain_vocabulary_is_found(tmp_path: Path) -> None:
    model = make_model(
        tmp_path,
        tokenizer_config__json={"eos_token": "</s>"},
        tokenizer__json={"added_tokens": [], "model": {"vocab": {"</s>": 5}}},
    )
    assert resolve_model(str(model)).eos_token_ids == (2, 5)


def test_the_language_part_of_a_model_for_pictures_counts(tmp_path: Path) -> None:
    inner = {"max_position_embeddings": 77, "dtype": "float16", "eos_token_id": 9}
    model = make_model(tmp_path, config={"text_config": inner})
    info = resolve_model(str(model))
    assert (info.max_model_len, info.checkpoint_dtype, info.eos_token_ids) == (77, "float16", (2, 9))


def test_a_model_without_a_known_length_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, config={"max_position_embeddings": None})
    with pytest.raises(UnsupportedModelError, match="how many positions"):
        resolve_model(str(model))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickled_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path)
    (model / "model.safetensors").rename(model / name)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*can run code"):
        resolve_model(str(model))


def test_pickled_weights_beside_safetensors_do_no_harm(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    (model / "pytorch_model.bin").write_bytes(b"anything")
    assert resolve_model(str(model)).checkpoint_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["config__json", "tokenizer_config__json"])
def test_a_model_with_its_own_code_is_refused(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path)
    path = model / name.replace("__", ".")
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}))
    (model / "modeling_x.py").write_text("raise SystemExit('this must never run')")
    with pytest.raises(UnsupportedModelError, match="auto_map"):
        resolve_model(str(model))


def test_a_directory_without_a_configuration_names_the_gguf_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match=r"name the file itself: .*small\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("content", ["[1]", "{", '{"a": ' * 100_000])
def test_a_damaged_configuration_is_an_error_of_one_line(tmp_path: Path, content: str) -> None:
    model = make_model(tmp_path)
    (model / "config.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        resolve_model(str(model))


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/model", "missing.gguf", "a b", "x/y/z"])
def test_what_cannot_be_a_hub_id_is_a_missing_path(model: str) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        resolve_model(model)


def test_a_revision_makes_no_sense_for_a_local_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--revision"):
        resolve_model(str(make_model(tmp_path)), revision="main")


def test_a_single_weight_file_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a file"):
        resolve_model(str(make_model(tmp_path) / "model.safetensors"))


class Hub:
    """Stands in for `huggingface_hub.snapshot_download` and keeps what it was asked."""

    def __init__(self, directory: Path, error: Exception | None = None) -> None:
        self.directory, self.error = directory, error
        self.asked: dict[str, Any] = {}

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.asked = {"repo_id": repo_id, **options}
        if self.error:
            raise self.error
        return str(self.directory)


def test_a_hub_id_is_fetched_and_pinned_to_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub = Hub(make_model(tmp_path / "snapshots" / commit))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    info = resolve_model("someone/model-1.0", revision="main")
    assert (info.name, info.source, info.revision) == ("someone/model-1.0", "hub", commit)
    assert (hub.asked["repo_id"], hub.asked["revision"]) == ("someone/model-1.0", "main")


def test_only_safetensors_and_tokenizer_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(make_model(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    resolve_model("someone/model")
    repository = [
        *("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat_template.jinja"),
        *("pytorch_model.bin", "modeling_x.py", "consolidated.safetensors", "onnx/model.json", "model.pt", "tf.h5"),
    ]
    fetched = huggingface_hub.utils.filter_repo_objects(
        repository, allow_patterns=hub.asked["allow_patterns"], ignore_patterns=hub.asked["ignore_patterns"]
    )
    assert list(fetched) == repository[:4]


def test_a_local_directory_comes_before_a_hub_id_of_the_same_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "someone" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("someone/model").source == "directory"


def test_a_hub_that_cannot_be_reached_is_worth_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = hub_errors.LocalEntryNotFoundError("no connection")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, error))
    with pytest.raises(StoppedEarlyError, match=r"someone/model .* no connection"):
        resolve_model("someone/model")


def test_an_unknown_hub_model_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = hub_errors.RepositoryNotFoundError.__new__(hub_errors.RepositoryNotFoundError)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, error))
    with pytest.raises(UsageError, match="neither a local path nor a model on the hub"):
        resolve_model("someone/modell")


def test_digests_follow_content_not_place(tmp_path: Path) -> None:
    first = resolve_model(str(make_model(tmp_path / "a")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    second = resolve_model(str(tmp_path / "b"))
    names = ("config_digest", "weights_digest", "tokenizer_digest", "template_digest")
    assert [getattr(first, name) for name in names] == [getattr(second, name) for name in names]


def test_each_digest_changes_with_its_own_files_only(tmp_path: Path) -> None:
    model = make_model(tmp_path, tokenizer__json={"model": {"vocab": {"a": 0}}}, tokenizer_config__json={})
    names = ("config_digest", "weights_digest", "tokenizer_digest", "template_digest")

    def changed(before: Any) -> set[str]:
        after = resolve_model(str(model))
        return {name for name in names if getattr(before, name) != getattr(after, name)}

    info = resolve_model(str(model))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert changed(info) == {"template_digest"}
    info = resolve_model(str(model))
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')
    assert changed(info) == {"tokenizer_digest"}
    info = resolve_model(str(model))
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-16 - 12800] ^= 1  # in the middle of tensor "a"
    (model / "model.safetensors").write_bytes(content)
    assert changed(info) == {"weights_digest"}
    info = resolve_model(str(model))
    (model / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 1.0}))
    assert changed(info) == {"config_digest"}


def test_reading_a_model_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    make_model(tmp_path)
    program = (
        "import sys; from batchjob.models import resolve_model; resolve_model(sys.argv[1]);"
        "print(sorted({'torch', 'transformers', 'numpy', 'pyarrow', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"max_length": 20, "max_new_tokens": 5}, {"temperature": 0.0}),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(
    tmp_path: Path, generation_config: dict[str, Any], expected: dict[str, Any]
) -> None:
    info = resolve_model(str(make_model(tmp_path, generation_config__json=generation_config)))
    assert sampling_defaults(info) == expected


def test_a_generation_config_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    config = {"do_sample": True, "top_p": 3.0}
    info = resolve_model(str(make_model(tmp_path, generation_config__json=config)))
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json makes no sense: top_p"):
        sampling_defaults(info)


def test_settings_without_effect_are_listed_and_neutral_ones_are_not(tmp_path: Path) -> None:
    config = {"no_repeat_ngram_size": 3, "num_beams": 1, "suppress_tokens": None, "typical_p": 1.0, "top_k": 5}
    info = resolve_model(str(make_model(tmp_path, generation_config__json=config)))
    assert ignored_generation_settings(info) == ("no_repeat_ngram_size = 3",)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantised weights \(awq\)"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, r"quantised weights \(fp8\)"),
        ({"compression_config": {"format": "pack"}}, r"quantised weights \(compression_config in config.json\)"),
        ({"quantization": {"bits": 4, "group_size": 64}}, r"quantised weights \(quantization in config.json\)"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"a LlamaForSequenceClassification \(architectures"),
        ({"architectures": ["BertForMaskedLM"]}, r"not a model that writes text"),
        ({"architectures": ["Qwen2ForRewardModel"]}, r"not a model that writes text"),
        ({"transformers_weights": "other.safetensors"}, r"names its own weights"),
    ],
)
def test_weights_that_are_not_plain_numbers_of_the_model_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        resolve_model(str(make_model(tmp_path, config=config)))


def test_an_adapter_beside_or_in_place_of_a_model_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, adapter_config__json={"peft_type": "LORA"})
    with pytest.raises(UnsupportedModelError, match=r"adapter .* Merge it into the model"):
        resolve_model(str(model))
    (model / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="it is an adapter: merge it"):
        resolve_model(str(model))


def test_weights_that_change_while_they_are_loaded_are_noticed(tmp_path: Path) -> None:
    info = resolve_model(str(make_model(tmp_path)))
    info.refuse_changed_files()
    write_safetensors(tmp_path / "model.safetensors", {"a": b"\0" * 16})
    with pytest.raises(UnsupportedModelError, match="changed while they were loaded"):
        info.refuse_changed_files()


def test_a_single_file_beside_an_index_of_others_is_said(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors"}}
    info = resolve_model(str(make_model(tmp_path, **{"model__safetensors__index__json": index})))
    assert info.weight_files == ("model.safetensors",)
    assert "model.safetensors is used" in info.warnings[0]
    index = {"weight_map": {"a": "model.safetensors"}}
    info = resolve_model(str(make_model(tmp_path, **{"model__safetensors__index__json": index})))
    assert info.warnings == ()


@pytest.mark.parametrize("file_name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_quantised_weights_are_known_by_the_files_of_the_tools_too(file_name: str, tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / file_name).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=rf"quantised weights \({file_name}\)"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "kind", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForConditionalGeneration", "Qwen2Model"]
)
def test_what_may_be_a_language_model_is_not_refused_for_its_name(kind: str, tmp_path: Path) -> None:
    resolve_model(str(make_model(tmp_path, config={"architectures": [kind]})))


def test_a_configuration_that_changes_while_the_model_is_loaded_is_noticed(tmp_path: Path) -> None:
    info = resolve_model(str(make_model(tmp_path)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    with pytest.raises(UnsupportedModelError, match=r"config.json changed while the model was loaded"):
        info.refuse_changed_files()


def test_the_digest_of_the_template_covers_those_that_the_tokenizer_loads(tmp_path: Path) -> None:
    def digest(**files: Any) -> str:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        more = files.pop("more", None)
        model = make_model(path, **files)
        if more is not None:
            (model / "additional_chat_templates").mkdir()
            (model / "additional_chat_templates" / "tool_use.jinja").write_text(more)
        return resolve_model(str(model)).template_digest

    processor = {"chat_template__json": {"chat_template": "P"}}  # not read by tokenizers
    first, second = ({"tokenizer_config__json": {"chat_template": text}} for text in "AB")
    assert digest(**processor) == ""
    assert digest(**processor, **first) == digest(**first) != digest(**processor, **second)
    assert len({digest(more=""), digest(more="X"), digest(more="Y"), digest(**first)}) == 4


def test_all_files_of_a_tokenizer_are_in_its_digest(tmp_path: Path) -> None:
    digests = {resolve_model(str(make_model(tmp_path))).tokenizer_digest}
    names = ["tokenizer.4.0.0.json", "tokenizer.model.v3", "qwen.tiktoken", "source.spm", "bpe.codes", "vocab-src.json"]
    for name in names:
        (tmp_path / name).write_text("{}")
        digests.add(resolve_model(str(tmp_path)).tokenizer_digest)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).tokenizer_digest in digests
    assert len(digests) == 1 + len(names)
