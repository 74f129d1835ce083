"""Tiny random Gemma 3 and PaliGemma with towers, and what transformers makes of prompts with pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from legato.vision.gemma import BICUBIC, BILINEAR
from tests.models.tiny_today import SIZES, _gemma3
from tests.models.tiny_vision import IMAGE, continued, decoded, write_tokenizer

FIRST, LAST = 13, 14  # of the tokens of a picture in Gemma 3
TOWER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=56,
             patch_size=7, initializer_range=0.3, vision_use_head=False)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}model:{% endif %}"
)
NUM_TOKENS = 16  # of a picture in Gemma 3: a quarter of its patches


def tiny_gemma3_images(folder: Path, seed: int = 0) -> Path:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(seed)
    ids = dict(boi_token_index=FIRST, eoi_token_index=LAST, image_token_index=IMAGE)
    text = {**SIZES, **_gemma3()}
    config = Gemma3Config(text_config=text, vision_config=TOWER, mm_tokens_per_image=NUM_TOKENS, **ids)
    model = _random(Gemma3ForConditionalGeneration(config))
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(0, 0.3)
    tokens = {FIRST: "<start_of_image>", IMAGE: "<image_soft_token>", LAST: "<end_of_image>"}
    return _save(model, folder, tokens, BILINEAR)


def tiny_paligemma(folder: Path, seed: int = 0, family: str = "gemma") -> Path:
    """64 tokens are a picture."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    torch.manual_seed(seed)
    text: dict[str, Any] = dict(SIZES, model_type=family, head_dim=24)
    if family == "gemma2":
        text |= dict(sliding_window=20, query_pre_attn_scalar=20, attn_logit_softcapping=3.0,
                     final_logit_softcapping=5.0)  # fmt: skip
    vision = dict(TOWER, projection_dim=96)
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, projection_dim=96,
                             bos_token_id=1)  # fmt: skip
    return _save(_random(PaliGemmaForConditionalGeneration(config)), folder, {IMAGE: "<image>"}, BICUBIC)


def tiny_paligemma2(folder: Path, seed: int = 0) -> Path:
    return tiny_paligemma(folder, seed, "gemma2")


def _random(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            if "post_feedforward" in name:  # else the embedding drowns what the layers add, and tokens repeat
                parameter.add_(8.0)
    return model


def _save(model: Any, folder: Path, tokens: dict[int, str], resample: int) -> Path:
    """The first of the tokens stands for a picture."""
    model.save_pretrained(folder)
    processor = dict(size=dict(height=56, width=56), resample=resample, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder, tokens)
    settings = {"chat_template": TEMPLATE.replace("MARK", next(iter(tokens.values()))), "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def gemma3_oracle(
    folder: Path, input_ids: list[int], images: list[bytes], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """As `tiny_vision.qwen_oracle`; a picture's tokens are spelled out."""
    from transformers import Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    model = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    seen: dict[str, Any] = {}
    if images:
        made = Gemma3ImageProcessorPil.from_pretrained(folder)(decoded(images), return_tensors="pt")
        spelled = [FIRST, *[IMAGE] * NUM_TOKENS, LAST]
        for _ in images:
            start = input_ids.index(FIRST)
            assert input_ids[start : start + len(spelled)] in ([FIRST] * len(spelled), spelled)
            input_ids = [*input_ids[:start], *(-i for i in spelled), *input_ids[start + len(spelled) :]]
        input_ids = [abs(i) for i in input_ids]
        seen = dict(pixel_values=made["pixel_values"], token_type_ids=(torch.tensor([input_ids]) == IMAGE).int())
    return continued(model.eval(), input_ids, num_tokens, seen)


def paligemma_oracle(
    folder: Path, input_ids: list[int], images: list[bytes], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """All of a prompt is what transformers calls its prefix."""
    from transformers import PaliGemmaForConditionalGeneration
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    model = PaliGemmaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    seen: dict[str, Any] = dict(token_type_ids=torch.zeros(1, len(input_ids), dtype=torch.int64))
    if images:
        made = SiglipImageProcessorPil.from_pretrained(folder)(decoded(images), return_tensors="pt")
        seen["pixel_values"] = made["pixel_values"]
    tokens, logits = continued(model.eval(), input_ids, num_tokens, seen)
    # Gemma 2 was trained with a cap, which transformers 5 applies to the language model alone.
    cap = getattr(model.config.text_config, "final_logit_softcapping", None)
    return tokens, logits if cap is None else (logits / cap).tanh() * cap
