"""Models that exist in outline only: their speed can be measured without their weights (`--load-format dummy`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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

# Name -> config.json. The first two have the dimensions of Llama 3.1 8B and Llama 3.2 1B.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA_3 | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128},
    "llama-1b": _LLAMA_3
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    | {"tie_word_embeddings": True},
    "tiny": _LLAMA
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096}
    | {"bos_token_id": 1, "eos_token_id": 2},
}


def write_shape(name: str, folder: Path) -> Path:
    """A model's folder without weights. Its tokenizer knows bytes only: enough for calls that answer with text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=2))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
