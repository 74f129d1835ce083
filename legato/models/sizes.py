"""The sizes that every causal model has, read from config.json under whichever names the architecture has for them.

Brings in no torch: models are built from them, and `legato plan` counts with them before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from legato.models.keys import Keys

# Sizes that a config.json leaves out where they are the defaults of transformers.
_GEMMA3 = dict(
    vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131_072
)
_LLAVA_NEXT = dict(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32064,
    max_position_embeddings=4096,
)  # fmt: skip
_IDEFICS3 = dict(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32_000,
    max_position_embeddings=2048,
)  # fmt: skip
_IDEFICS2 = dict(_IDEFICS3, intermediate_size=14_336, num_key_value_heads=8, max_position_embeddings=131_072)
_PALIGEMMA = dict(
    vocab_size=257_216, num_attention_heads=8, num_key_value_heads=1, head_dim=256, max_position_embeddings=8192
)
_MLLAMA = dict(
    hidden_size=4096, intermediate_size=14_336, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128_256, max_position_embeddings=131_072, rope_theta=500_000.0, rms_norm_eps=1e-5,
)  # fmt: skip
# It has no attention, and so neither heads nor a table of positions: sequences may be as long as one likes.
_MAMBA = dict(num_attention_heads=1, max_position_embeddings=32_768)
LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "llava_next": _LLAVA_NEXT,
    "idefics2": _IDEFICS2,
    "idefics3": _IDEFICS3,
    "mamba": _MAMBA,
    "mllama": _MLLAMA,
    "paligemma": _PALIGEMMA,
    "smolvlm": _IDEFICS3,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int  # the longest sequence that is served
    keys: Keys

    @classmethod
    def of(cls, config: dict[str, Any]) -> Sizes:
        # Multimodal models keep the keys of their language model in an object of its own.
        language = Keys(config).below("text_config").raw
        model_type = str(config.get("model_type"))
        keys = Keys({**LEFT_OUT.get(model_type, {}), **config, **language})
        num_heads = keys.count(
            "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"
        )
        hidden_size = keys.count("hidden_size", "n_embd", "n_embed", "d_model")
        shared = keys.below("attn_config").get("kv_n_heads")  # DBRX's
        return Sizes(
            model_type=model_type,
            vocab_size=keys.count("vocab_size"),
            hidden_size=hidden_size,
            num_layers=keys.count("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
            num_heads=num_heads,
            num_kv_heads=keys.count("num_key_value_heads", "num_kv_heads", default=shared or num_heads),
            head_dim=keys.count("head_dim", "d_kv", default=hidden_size // num_heads),
            max_positions=keys.count(
                "max_position_embeddings",
                "n_positions",
                "max_seq_len",
                "seq_length",
                "model_max_length",
                default=2048,
            ),
            keys=keys,
        )
