"""A small real tokenizer without torch, and a builder of prompts with defaults for everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchjob.prompts import PromptBuilder, PromptConfig, resolve_prompt
from batchjob.prompts.fake_tokenizer import FakeTokenizer
from batchjob.prompts.hf_tokenizer import HFTokenizer
from batchjob.prompts.tokenizer import Tokenizer
from batchjob.records import Record
from batchjob.sampling import SamplingParams
from batchjob.spec import JobSpec

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('this model has no system role') }}{% endif %}"
    "{% if m['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('turns must alternate user and assistant') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(path: Path, *, template: str | None, adds_bos: bool) -> Path:
    """A byte-level tokenizer in `path`: every byte a token, `<s>` is 1; with `adds_bos` it puts that first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=special[3:],
        chat_template=template,
    )
    wrapped.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tokenizer_dir(template, adds_bos)`: made once for each."""
    made: dict[Any, Path] = {}

    def tokenizer_dir(template: str | None = STRICT, adds_bos: bool = True) -> Path:
        key = (template, adds_bos)
        if key not in made:
            made[key] = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=template, adds_bos=adds_bos)
        return made[key]

    return tokenizer_dir


@pytest.fixture
def hf(tokenizer_dir: Callable[..., Path]) -> Callable[..., HFTokenizer]:
    return lambda *args, **options: HFTokenizer(tokenizer_dir(*args, **options))


@pytest.fixture
def builder() -> Callable[..., PromptBuilder]:
    """`builder(columns, tokenizer, max_model_len=..., prompt="{x}", chat=True, sampling=...)`."""

    def builder(columns: list[str], tokenizer: Tokenizer | None = None, **options: Any) -> PromptBuilder:
        tokenizer = tokenizer or FakeTokenizer()
        own = ("clock", "max_model_len", "sampling", "render_seconds", "render_chars", "vocab_size")
        limits = {name: options.pop(name) for name in own if name in options}
        spec = JobSpec(**options)
        config = PromptConfig(
            source=resolve_prompt(spec, columns),
            chat=spec.chat,
            system=spec.system,
            length_policy=spec.length_policy,
            **{
                "sampling": SamplingParams(),
                "max_model_len": 1000,
                "vocab_size": tokenizer.vocab_size,
                **limits,
            },
        )
        return PromptBuilder(config, tokenizer)

    return builder


@pytest.fixture
def record() -> Callable[..., Record]:
    """`record(prompt="x")`: row 0 of a file called rows.jsonl, on line 1."""
    return lambda index=0, **fields: Record(index, fields, f"rows.jsonl:{index + 1}")
