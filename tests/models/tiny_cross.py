"""Tiny random models with layers that attend to pictures, and what transformers makes of prompts with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from legato.vision.cross import ALIGNMENT
from tests.models.tiny_vision import TEXT, continued, decoded, write_tokenizer

MLLAMA_IMAGE = 320  # behind the vocabulary, as in the published checkpoints


def without_front(input_ids: list[int], token_id: int) -> list[int]:
    """The text: slots of pictures come before it."""
    leading = next((i for i, number in enumerate(input_ids) if number != token_id), len(input_ids))
    return input_ids[leading // ALIGNMENT * ALIGNMENT :]


def tiny_mllama(folder: Path, seed: int = 0) -> Path:
    """Tiles of 28 with sixteen patches, up to four of them."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    torch.manual_seed(seed)
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_global_layers=2, attention_heads=2,
                  image_size=28, patch_size=7, max_num_tiles=4, intermediate_layers_indices=[0, 2],
                  vision_output_dim=96, initializer_range=0.3)  # fmt: skip
    text = dict(TEXT, num_hidden_layers=5, cross_attention_layers=[1, 3], pad_token_id=0,
                rope_parameters=dict(rope_type="default", rope_theta=10_000.0))  # fmt: skip
    config = MllamaConfig(text_config=text, vision_config=vision, image_token_index=MLLAMA_IMAGE)
    model = MllamaForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name and "proj" not in name:
                parameter.fill_(0.7)
            elif parameter.dim() == 1 or "positional_embedding" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    processor = dict(size=dict(height=28, width=28), max_image_tiles=4, resample=2)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder, {MLLAMA_IMAGE: "<|image|>"})
    template = (
        "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
        "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    return folder


def mllama_oracle(
    folder: Path, input_ids: list[int], images: list[bytes], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """As `tiny_vision.qwen_oracle`, with the attention of tokens that no picture precedes as Meta has it: nothing."""
    from transformers import MllamaForConditionalGeneration
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    model = MllamaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.eval()
    ids = without_front(input_ids, MLLAMA_IMAGE)
    if not images:
        return continued(model, ids, num_tokens, {})
    _hide_what_follows(model)
    made = dict(MllamaImageProcessorPil.from_pretrained(folder)([decoded(images)], return_tensors="pt"))
    spans = get_cross_attention_token_mask(ids, MLLAMA_IMAGE)
    mask = torch.tensor(convert_sparse_cross_attention_mask_to_dense([spans], made.pop("num_tiles"), 4, len(ids)))
    tokens, cache, logits = torch.tensor([ids]), None, []
    seen: dict[str, Any] = made
    with torch.inference_mode():
        for _ in range(num_tokens):
            out = model(tokens, past_key_values=cache, use_cache=True, cross_attention_mask=mask, **seen)
            cache, seen, mask = out.past_key_values, {}, mask[:, -1:]
            logits.append(out.logits[0, -1])
            tokens = out.logits[:, -1:].argmax(-1)
    return [int(row.argmax()) for row in logits], torch.stack(logits)


def _hide_what_follows(model: Any) -> None:
    for layer in model.model.language_model.layers:
        if not hasattr(layer, "cross_attn"):
            continue
        rows: dict[str, Any] = {}

        def keep(module: Any, args: Any, kwargs: Any, rows: dict[str, Any] = rows) -> None:
            rows["sees"] = kwargs["full_text_row_masked_out_mask"][:, 0]

        def hide(module: Any, args: Any, output: Any, rows: dict[str, Any] = rows) -> Any:
            return output[0] * rows["sees"], *output[1:]

        layer.register_forward_pre_hook(keep, with_kwargs=True)
        layer.cross_attn.register_forward_hook(hide)


AROUND, IDEFICS_IMAGE = 320, 321  # behind the vocabulary, with matrices of their own


def tiny_idefics(folder: Path, seed: int = 0) -> Path:
    from transformers import IdeficsConfig, IdeficsForVisionText2Text

    torch.manual_seed(seed)
    vision = dict(embed_dim=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28,
                  patch_size=7, initializer_range=0.3)  # fmt: skip
    perceiver = dict(resampler_n_latents=5, resampler_depth=2, resampler_n_heads=2, resampler_head_dim=12,
                     use_resampler=True, qk_layer_norms_perceiver=True)  # fmt: skip
    text = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
    config = IdeficsConfig(
        **dict(text, num_hidden_layers=4), additional_vocab_size=2, cross_layer_interval=2, qk_layer_norms=True,
        use_resampler=True, vision_config=vision, perceiver_config=perceiver, alpha_initializer="ones",
        alpha_type="vector", pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = IdeficsForVisionText2Text(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "additional" in name or "alpha" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(image_size=28)))
    write_tokenizer(folder, {AROUND: "<fake_token_around_image>", IDEFICS_IMAGE: "<image>"})
    return folder


def idefics_oracle(
    folder: Path, input_ids: list[int], images: list[bytes], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Each token sees the last picture before it."""
    from transformers import IdeficsForVisionText2Text
    from transformers.models.idefics.image_processing_pil_idefics import IdeficsImageProcessorPil

    model = IdeficsForVisionText2Text.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = without_front(input_ids, IDEFICS_IMAGE)
    pixels = torch.zeros(1, 1, 3, 28, 28)
    mask = torch.zeros(1, len(ids), max(1, len(images)), dtype=torch.int64)
    if images:
        pixels = IdeficsImageProcessorPil.from_pretrained(folder)(decoded(images), return_tensors="pt")[None]
        last = -1
        for place, number in enumerate(ids):
            last += number == IDEFICS_IMAGE
            if last >= 0:
                mask[0, place, last] = 1
    tokens, cache, logits = torch.tensor([ids]), None, []
    with torch.inference_mode():
        for _ in range(num_tokens):
            out = model(tokens, past_key_values=cache, use_cache=True, pixel_values=pixels, image_attention_mask=mask)
            cache, mask = out.past_key_values, mask[:, -1:]
            logits.append(out.logits[0, -1])
            tokens = out.logits[:, -1:].argmax(-1)
    return [int(row.argmax()) for row in logits], torch.stack(logits)
