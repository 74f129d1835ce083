"""Tiny random models that see, and what transformers makes of prompts with pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

IMAGE, BEGIN, END, VIDEO = 9, 10, 11, 12
QWEN_TOKENS = {IMAGE: "<|image_pad|>", BEGIN: "<|vision_start|>", END: "<|vision_end|>", VIDEO: "<|video_pad|>"}
QWEN_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

LLAVA_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_qwen2_vl(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Heads of 16, so that time has two pairs of dimensions and height and width have three."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(seed)
    text = dict(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=1,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 3, 3]),
    )
    vision = dict(depth=2, embed_dim=32, hidden_size=96, num_heads=2, mlp_ratio=2, initializer_range=0.3)
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        video_token_id=VIDEO,
        **changes,
    )
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    processor = dict(min_pixels=56 * 56, max_pixels=28 * 28 * 64, patch_size=14, merge_size=2, temporal_patch_size=2)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder, QWEN_TOKENS)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": QWEN_TEMPLATE, "eos_token": "</s>"}))
    return folder


def write_tokenizer(folder: Path, specials: dict[int, str]) -> None:
    """That of `tiny_models`, with these special tokens."""
    from tests import tiny_models

    tiny_models.write_tokenizer(folder)
    file = folder / "tokenizer.json"
    saved = json.loads(file.read_text())
    vocab = {token_id: token for token, token_id in saved["model"]["vocab"].items()} | specials
    saved["model"]["vocab"] = {token: token_id for token_id, token in vocab.items()}
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    saved["added_tokens"] += [{"id": token_id, "content": token, **plain} for token_id, token in specials.items()]
    saved["added_tokens"].sort(key=lambda token: int(token["id"]))
    file.write_text(json.dumps(saved))


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Coarse noise: not one colour, and not so fine that resizing leaves nothing of it."""
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR).save(file, kind)
    return file.getvalue()


def decoded(images: list[bytes]) -> list[Any]:
    from PIL import Image

    return [Image.open(io.BytesIO(data)).convert("RGB") for data in images]


def qwen_oracle(
    folder: Path, input_ids: list[int], images: list[bytes], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """What transformers generates greedily from one prompt, and the logits [num_tokens, vocab] behind it."""
    from transformers import Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = Qwen2VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    seen: dict[str, Any] = {}
    if images:
        seen = dict(Qwen2VLImageProcessorPil.from_pretrained(folder)(decoded(images), return_tensors="pt"))
        seen["mm_token_type_ids"] = (torch.tensor([input_ids]) == IMAGE).int()
    tokens, cache, logits = torch.tensor([input_ids]), None, []
    with torch.inference_mode():
        for _ in range(num_tokens):
            out = model(tokens, past_key_values=cache, use_cache=True, **seen)
            cache, seen = out.past_key_values, {}
            logits.append(out.logits[0, -1])
            tokens = out.logits[:, -1:].argmax(-1)
    return [int(row.argmax()) for row in logits], torch.stack(logits)


def tiny_llava_next(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Tiles of 28, in five formats."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    torch.manual_seed(seed)
    text = LlamaConfig(
        vocab_size=320, hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, initializer_range=0.3, eos_token_id=2,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=7,
        initializer_range=0.3, projection_dim=16,
    )  # fmt: skip
    formats = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    config = LlavaNextConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE, image_grid_pinpoints=formats, **changes
    )
    LlavaNextForConditionalGeneration(config).save_pretrained(folder)
    write_tokenizer(folder, {IMAGE: "<image>"})
    write_llava_processor(folder, formats)
    return folder


def write_llava_processor(folder: Path, formats: list[list[int]]) -> None:
    """Everything around the weights as transformers writes it: one file for the processor and what is below it."""
    from transformers import LlavaNextProcessor, PreTrainedTokenizerFast
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    LlavaNextProcessor(
        LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=formats
        ),
        PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's first, which that strategy leaves out
        chat_template=LLAVA_TEMPLATE,
    ).save_pretrained(folder)


def llava_oracle(
    folder: Path, input_ids: list[int], images: list[bytes], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """As `qwen_oracle`."""
    from transformers import LlavaNextForConditionalGeneration
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    model = LlavaNextForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    seen: dict[str, Any] = {}
    if images:
        seen = dict(LlavaNextImageProcessorPil.from_pretrained(folder)(decoded(images), return_tensors="pt"))
    tokens, cache, logits = torch.tensor([input_ids]), None, []
    with torch.inference_mode():
        for _ in range(num_tokens):
            out = model(tokens, past_key_values=cache, use_cache=True, **seen)
            cache, seen = out.past_key_values, {}
            logits.append(out.logits[0, -1])
            tokens = out.logits[:, -1:].argmax(-1)
    return [int(row.argmax()) for row in logits], torch.stack(logits)
