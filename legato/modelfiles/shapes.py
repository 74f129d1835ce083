"""Model configurations without weights, for benchmarks with `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# A space in a byte-level vocabulary.
SPACE = "\u0120"

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}

_LLAMA_3: dict[str, Any] = _LLAMA | {
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

_QWEN_3_8B: dict[str, Any] = _LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}

_FALCON_7B: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "torch_dtype": "bfloat16",
    "vocab_size": 65_024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_key_value_heads": 1,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
    "alibi": False,
    "bias": False,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 11,
    "eos_token_id": 11,
}

_STARCODER_15B: dict[str, Any] = {
    "architectures": ["GPTBigCodeForCausalLM"],
    "model_type": "gpt_bigcode",
    "torch_dtype": "bfloat16",
    "vocab_size": 49_152,
    "n_embd": 6144,
    "n_inner": 24_576,
    "n_layer": 40,
    "num_attention_heads": 48,
    "num_key_value_heads": 1,
    "multi_query": True,
    "n_positions": 8192,
    "activation_function": "gelu",
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

_MIXTRAL_8X7B: dict[str, Any] = _LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "rope_theta": 1_000_000.0,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "max_position_embeddings": 32_768,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_QWEN_2_5_VL: dict[str, Any] = _LLAMA | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
}

_QWEN_2_5_VL_7B: dict[str, Any] = _QWEN_2_5_VL | {
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128_000,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}

_TINY_VL: dict[str, Any] = _QWEN_2_5_VL | {
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 505,
    "eos_token_id": 506,
    "vision_start_token_id": 501,
    "vision_end_token_id": 502,
    "image_token_id": 503,
    "video_token_id": 504,
    "vision_config": _QWEN_2_5_VL_7B["vision_config"]
    | {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    | {"fullatt_block_indexes": [1]},
}

# Name -> config.json. The first two have the dimensions of Llama 3.1 8B and Llama 3.2 1B; the tiny ones are made up;
# the others are as published.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA_3 | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128},
    "llama-1b": _LLAMA_3
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    | {"tie_word_embeddings": True},
    "qwen3-8b": _QWEN_3_8B,
    "falcon-7b": _FALCON_7B,
    "starcoder-15b": _STARCODER_15B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "qwen2.5-vl-7b": _QWEN_2_5_VL_7B,
    "tiny": _LLAMA
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "tiny-vl": _TINY_VL,
}


def _special_tokens(config: dict[str, Any]) -> dict[int, str]:
    """By id, of a shape that takes images."""
    names = {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "bos_token_id": "<|endoftext|>",
        "eos_token_id": "<|im_end|>",
    }
    return {config[key]: token for key, token in names.items()} if "vision_config" in config else {}


# Further files of shapes that take images.
IMAGE_FILES: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    },
    "tokenizer_config.json": {
        "tokenizer_class": "Qwen2Tokenizer",
        "chat_template": (
            "{% for message in messages %}{{ message.role }}\n{% if message.content is string %}"
            "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
            "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
            "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
        ),
    },
}


def write_shape(name: str, folder: Path) -> Path:
    """Write a model folder without weights. Its tokenizer has a made-up word for every token id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=2))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"{SPACE}{_word(number)}" for number in range(len(alphabet), SHAPES[name]["vocab_size"]))
    special = _special_tokens(SHAPES[name])
    vocabulary = {special.get(number, token): number for number, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    for file, content in IMAGE_FILES.items() if special else ():
        (folder / file).write_text(json.dumps(content, indent=2))
    return folder


def _word(number: int) -> str:
    """The number in base 26, in letters."""
    letters = ""
    while number:
        number, digit = divmod(number, 26)
        letters = chr(ord("a") + digit) + letters
    return letters
