"""Tiny random models, one per shape of causal language model, built from configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from batchjob_kernels.attention import gather
from batchjob_kernels.attention.select import Selection

WINDOW = 6  # shorter than every prompt of the tests, so that it bites
_LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD_DIM = {**_LLAMA, "head_dim": 16}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "llama_biased": ("LlamaConfig", {**_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (
        "LlamaConfig",
        {
            **_LLAMA,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen2_window": (
        "Qwen2Config",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _ALTERNATING},
    ),
    "qwen3": ("Qwen3Config", _HEAD_DIM),
    "qwen3_moe": ("Qwen3MoeConfig", {**_HEAD_DIM, **_MOE}),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {**_HEAD_DIM, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**_HEAD_DIM, "sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "phi3": ("Phi3Config", {**_LLAMA, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2Config", _LLAMA),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "eos_token_id": 2},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_HEAD_DIM,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}

# Family -> fused attentions, MLPs, layers; of three.
FUSED_PARTS = {
    "llama": (3, 3, 3),
    "llama_biased": (3, 3, 3),
    "llama3_rope": (3, 3, 3),
    "qwen2": (3, 3, 3),
    "qwen2_window": (3, 3, 3),
    "qwen3": (3, 3, 3),
    "qwen3_moe": (3, 0, 3),
    "mistral": (3, 3, 3),
    "gemma2": (3, 3, 3),
    "gemma3": (3, 3, 3),
    "phi3": (3, 3, 3),
    "olmo2": (0, 3, 0),
    "gpt_neox": (0, 0, 0),
    "gpt2": (0, 0, 0),
    "gpt_oss": (3, 0, 3),
}

# What the attention of others has that is not in it: see `attention`, `load_check` and `model`.
_PLAIN = {k: v for k, v in _LLAMA.items() if k not in ("intermediate_size", "num_key_value_heads")}
UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    # The module with the last hidden states is not the base model.
    "opt": ("OPTConfig", {**_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    # Counts positions itself.
    "bart": (
        "BartConfig",
        {**_PLAIN, "d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    ),
    # Drops keyword arguments on the way to its attention function.
    "stablelm": ("StableLmConfig", _LLAMA),
    # Values of another size than keys.
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    # Its window is in the mask alone.
    "qwen2_moe_window": (
        "Qwen2MoeConfig",
        {
            **_LLAMA,
            **_MOE,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_HEAD_DIM,
            **_MOE,
            "shared_expert_intermediate_size": 24,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "mamba": ("MambaConfig", {"vocab_size": 96, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}),
    "bloom": ("BloomConfig", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "lfm2": ("Lfm2Config", {**_LLAMA, "layer_types": ["conv", "full_attention", "conv"]}),
}


def build(config_name: str, values: dict[str, Any], **more: Any) -> Any:
    """A random model with enough contrast in its weights that argmaxes are not near-ties."""
    config = getattr(transformers, config_name)(**{**values, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.25)
            elif "norm" in name or "ln" in name or "sinks" in name or name.endswith("bias"):
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model.eval()


def save(directory: Path, config_name: str, values: dict[str, Any], **more: Any) -> Path:
    build(config_name, values, **more).save_pretrained(directory)
    return directory


def use_gather(calls: object) -> Selection:
    """The attention backend of a CPU, as `prepare_model` wants to be told."""
    return Selection("gather", gather, "for a test")
