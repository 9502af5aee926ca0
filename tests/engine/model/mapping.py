"""The differential test over all causal language models that Transformers knows.

Each model type gets a tiny random model from its configuration class. The engine runs it with small blocks, steps of a
few tokens, prompts that share a beginning, and a pool so small that rows are preempted. Then one eager forward of the
model over each row alone must choose the same tokens. `python tests/engine/model/mapping.py` prints the outcome of each
type, which docs/models.md lists.
"""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))
from families import WINDOW

from batchjob.core.blocks import BlockPool
from batchjob.core.scheduler import Scheduler
from batchjob.engine.config import EngineConfig
from batchjob.engine.runner import TorchRunner
from batchjob.errors import BatchJobError
from batchjob.records import Request
from batchjob.sampling import SamplingParams

TYPES: list[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
DOCS = Path(__file__).parents[3] / "docs" / "models.md"
NUM_OUTPUT = 8
MAX_MODEL_LEN = 64
PROMPT_LENS = (2 * WINDOW + 3, 1, WINDOW, 31, 12)
_NEAR_TIE = 1e-4  # of the largest logit
_MOST_PARAMETERS = 30_000_000
_SECONDS = 90  # for one type

# What is set wherever a configuration has such a setting, so that models are small and their windows bite.
_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "d_ff": 48,
    "d_inner": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_target_positions": 256,
    "sliding_window": WINDOW,
    "attention_chunk_size": MAX_MODEL_LEN,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "window_size": WINDOW,
    "local_attention": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "state_size": 4,
    "mamba_d_state": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_DROPPED = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path"}
# Settings of single types, where the ones above do not make a valid model.
_OWN: dict[str, dict[str, Any]] = {
    # Latent attention rotates only a part of each head, whose size is also that of its `head_dim`.
    **{
        name: {"head_dim": 8, "num_key_value_heads": 4}
        for name in (
            "axk1",
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe_lite",
            "longcat_flash",
            "minicpm3",
            "sarvam_mla",
            "youtu",
        )
    },
}


class Outcome(NamedTuple):
    model_type: str
    result: str  # "equal" | "refused" | "not built" | "WRONG" | "FAILED"
    detail: str = ""
    num_preempted: int = 0


def small_config(model_type: str) -> Any:
    """A configuration of a model type with small sizes."""
    return _small(type(transformers.AutoConfig.for_model(model_type)), _OWN.get(model_type, {}))


def _small(kind: type, own: dict[str, Any]) -> Any:
    default = kind()
    names = default.to_dict()
    attribute_map = getattr(kind, "attribute_map", {})
    values = {
        name: value
        for name, value in _SMALL.items()
        if name in names or (name in attribute_map and hasattr(default, name))
    }
    for name, value in _SMALL.items():
        if name in attribute_map and attribute_map[name] in values:
            values.pop(name, None)
        elif names.get(name, 0) is None and name in ("q_lora_rank", "sliding_window", "intermediate_size", "n_inner"):
            values[name] = value
    text = default.get_text_config()
    if text is not default:
        sub = next(name for name in default.sub_configs if getattr(default, name, None) is text)
        values = {name: value for name, value in values.items() if name.endswith("token_id")}
        values[sub] = _small(type(text), own).to_dict()
        own = {}
    return kind(**{**values, **own})


def build(model_type: str) -> Any:
    """A random model whose weights have contrast, in norms and biases too. Raises whatever Transformers raises."""
    config = small_config(model_type)
    with torch.device("meta"):
        sizes = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if (size := sum(parameter.numel() for parameter in sizes.parameters())) > _MOST_PARAMETERS:
        raise ValueError(f"the small configuration has {size:,} parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
        elif not any(part in name for part in ("A_log", "dt_bias")):
            parameter.data += 0.3 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer += 0.1 * torch.randn_like(buffer)
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model.eval()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in PROMPT_LENS]
    return [*rows, rows[3][:20] + rows[0]]  # one that shares blocks with another


def run_engine(path: Path, *, block_size: int, num_tokens: int, pool: int) -> tuple[list[list[int]], int]:
    """Output of each prompt, and how often a row was preempted."""
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=num_tokens,
        block_size=block_size,
        kv_cache_bytes=8 << 20,
    )
    runner = TorchRunner(path, config)
    capacity = runner.capacity()
    scheduler = Scheduler(
        BlockPool(min(pool, capacity.num_blocks), block_size),
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        prefix_caching=True,
    )
    for row, prompt in enumerate(prompts()):
        assert scheduler.add(Request(row, 0, prompt, SamplingParams(max_tokens=NUM_OUTPUT), stream=row)) is None
    outputs: dict[int, list[int]] = {}
    preempted = 0
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, runner.execute(plan).result().tokens[0])
        for seq in [slice_.seq for slice_ in plan.sampled]:
            if len(seq.tokens) == seq.max_len:
                outputs[seq.request.row_index] = seq.output_token_ids
                preempted += seq.num_preemptions
                scheduler.finish(seq)
    runner.close()
    return [outputs[row] for row in range(len(outputs))], preempted


@torch.inference_mode()
def difference(model: Any, outputs: list[list[int]]) -> str:
    """What is wrong with greedy outputs by the model's own forward over each row alone, or nothing."""
    for row, (prompt, output) in enumerate(zip(prompts(), outputs, strict=True)):
        if -1 in output:
            return f"row {row}: no finite numbers"
        logits = model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        gap = float((logits.max(dim=1).values - chosen).max() / logits.abs().max())
        if not gap <= _NEAR_TIE:
            return f"row {row}: other tokens (logits {gap:.2g} of the largest apart)"
    return ""


def outcome(model_type: str) -> Outcome:
    """Builds, runs and compares one model type."""
    try:
        model = build(model_type)
        difference(model, [[5] * NUM_OUTPUT] * len(prompts()))  # whether it runs at all by itself
    except Exception as error:
        return Outcome(model_type, "not built", f"{type(error).__name__}: {_line(error)}")
    preempted = 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        try:
            model.save_pretrained(path)
            # As Transformers loads it: it sets the embedding of a padding token to zeros, whatever the file says.
            kind = transformers.AutoModelForCausalLM
            model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        except Exception as error:
            return Outcome(model_type, "not built", f"does not save or load: {_line(error)}")
        for block_size, num_tokens, pool in ((4, 7, 11), (16, 64, 4)):
            try:
                outputs, count = run_engine(path, block_size=block_size, num_tokens=num_tokens, pool=pool)
            except BatchJobError as error:
                return Outcome(model_type, "refused", _line(error).replace(directory, "MODEL"))
            except Exception as error:
                return Outcome(model_type, "FAILED", f"{type(error).__name__}: {_line(error)}")
            preempted += count
            if problem := difference(model, outputs):
                return Outcome(model_type, "WRONG", problem)
    return Outcome(model_type, "equal", num_preempted=preempted)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def quiet() -> None:
    """One thread, and no word of Transformers."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def main() -> None:
    quiet()

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    for model_type in sys.argv[1:] or TYPES:
        signal.alarm(_SECONDS)
        print("\t".join(map(str, outcome(model_type))), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
