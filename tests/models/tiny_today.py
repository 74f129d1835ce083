"""Tiny random checkpoints of today's families, written by transformers.

Windows are shorter than most prompts, heads are grouped, and norms and biases are as random as everything else: as
transformers initialises them, a model that forgot them would answer the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import write_tokenizer

SIZES: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=96,
    intermediate_size=130,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=2,
    bos_token_id=1,
    pad_token_id=0,
    initializer_range=0.2,
)
TINY_EYES = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)


def tiny_mistral(folder: Path, **changes: Any) -> Path:
    return _write("Mistral", folder, dict(sliding_window=20), changes)


def tiny_qwen2(folder: Path, **changes: Any) -> Path:
    return _write("Qwen2", folder, {}, changes)


def tiny_qwen3(folder: Path, **changes: Any) -> Path:
    return _write("Qwen3", folder, dict(head_dim=24), changes)


def tiny_gemma(folder: Path, **changes: Any) -> Path:
    return _write("Gemma", folder, dict(head_dim=24), changes)


def tiny_gemma2(folder: Path, **changes: Any) -> Path:
    settings = dict(head_dim=24, sliding_window=20, query_pre_attn_scalar=20, attn_logit_softcapping=3.0,
                    final_logit_softcapping=5.0)  # fmt: skip
    return _write("Gemma2", folder, settings, changes)


def tiny_gemma3(folder: Path, **changes: Any) -> Path:
    return _write("Gemma3Text", folder, _gemma3(), changes, "Gemma3")


def tiny_gemma3_of_a_vision_model(folder: Path, **changes: Any) -> Path:
    """As Gemma 3 4B and larger come: the language model in `text_config`, a vision tower beside it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    text = {**SIZES, **_gemma3(), **changes}
    # Ids of images must be tokens, too.
    ids = dict(boi_token_index=317, eoi_token_index=318, image_token_index=319)
    config = Gemma3Config(text_config=text, vision_config=TINY_EYES, mm_tokens_per_image=4, **ids)
    return _save(Gemma3ForConditionalGeneration(config), folder)


def tiny_gemma3_of_its_day(folder: Path, **changes: Any) -> Path:
    """With config.json as the published checkpoints have it: other names for rope, and a pattern, not a list."""
    tiny_gemma3(folder, **changes)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name in ("rope_parameters", "layer_types", "_sliding_window_pattern", "tie_word_embeddings"):
        del config[name]
    config.update(sliding_window_pattern=2, rope_theta=50_000.0, rope_local_base_freq=1_000.0,
                  rope_scaling=dict(rope_type="linear", factor=4.0))  # fmt: skip
    file.write_text(json.dumps(config))
    return folder


def tiny_phi3(folder: Path, **changes: Any) -> Path:
    return _write("Phi3", folder, {}, changes)


def long_rope(num_factors: int, **more: Any) -> dict[str, Any]:
    """Two sets of divisors, of which texts as short as the tests' need the first."""
    short = [1.0 + 0.3 * i for i in range(num_factors)]
    return dict(rope_type="longrope", rope_theta=10_000.0, short_factor=short,
                long_factor=[7.0 * factor for factor in short], **more)  # fmt: skip


def tiny_olmo2(folder: Path, **changes: Any) -> Path:
    return _write("Olmo2", folder, {}, changes)


def tiny_granite(folder: Path, **changes: Any) -> Path:
    settings = dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.1, logits_scaling=0.5)
    return _write("Granite", folder, settings, changes)


def _gemma3() -> dict[str, Any]:
    kinds = {"full_attention": dict(rope_type="linear", factor=4.0, rope_theta=50_000.0),
             "sliding_attention": dict(rope_type="default", rope_theta=1_000.0)}  # fmt: skip
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return dict(head_dim=24, sliding_window=20, query_pre_attn_scalar=20, rope_parameters=kinds, layer_types=types)


def _write(
    family: str, folder: Path, settings: dict[str, Any], changes: dict[str, Any], model: str | None = None
) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings, **changes})
    return _save(getattr(transformers, f"{model or family}ForCausalLM")(config), folder)


def _save(model: torch.nn.Module, folder: Path) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            if "post_feedforward" in name:  # else the embedding drowns what the layers add, and tokens repeat
                parameter.add_(8.0)
    model.save_pretrained(folder)  # type: ignore[operator]
    write_tokenizer(folder)
    return folder
