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


TEXT: dict[str, Any] = dict(
    vocab_size=320, hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.3, eos_token_id=2, bos_token_id=1,
)  # fmt: skip
# Heads of 16: time has two pairs of dimensions, height and width have three.
AXES = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 3, 3])


def tiny_qwen2_vl(folder: Path, seed: int = 0, **changes: Any) -> Path:
    vision = dict(depth=2, embed_dim=32, hidden_size=96, num_heads=2, mlp_ratio=2, initializer_range=0.3)
    return _tiny_qwen("Qwen2VL", folder, dict(TEXT, rope_parameters=AXES), vision, 14, seed, changes)


def tiny_qwen2_5_vl(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Windows of two cells by two, and a layer without."""
    vision = dict(
        depth=3, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=96, window_size=56,
        fullatt_block_indexes=[1], initializer_range=0.3,
    )  # fmt: skip
    return _tiny_qwen("Qwen2_5_VL", folder, dict(TEXT, rope_parameters=AXES), vision, 14, seed, changes)


def tiny_qwen3_vl(folder: Path, seed: int = 0, **changes: Any) -> Path:
    vision = dict(
        depth=3, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=96, num_position_embeddings=25,
        deepstack_visual_indexes=[0, 2], initializer_range=0.3, patch_size=16,
    )  # fmt: skip
    axes = dict(AXES, mrope_section=[3, 3, 2], mrope_interleaved=True)
    return _tiny_qwen("Qwen3VL", folder, dict(TEXT, head_dim=16, rope_parameters=axes), vision, 16, seed, changes)


def _tiny_qwen(
    family: str, folder: Path, text: dict[str, Any], vision: dict[str, Any], patch: int, seed: int, more: dict[str, Any]
) -> Path:
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=BEGIN,
        vision_end_token_id=END, video_token_id=VIDEO, **more,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which would hide mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    cell = 4 * patch * patch
    processor = dict(min_pixels=4 * cell, max_pixels=64 * cell, patch_size=patch, merge_size=2, temporal_patch_size=2)
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
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    seen: dict[str, Any] = {}
    if images:
        seen = dict(Qwen2VLImageProcessorPil.from_pretrained(folder)(decoded(images), return_tensors="pt"))
        seen["mm_token_type_ids"] = (torch.tensor([input_ids]) == IMAGE).int()
    return continued(model, input_ids, num_tokens, seen)


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
    return continued(model, input_ids, num_tokens, seen)


IDEFICS_TOKENS = {IMAGE: "<image>", BEGIN: "<fake_token_around_image>", END: "<global-img>", VIDEO: "<row_1_col_1>",
                  13: "<row_1_col_2>", 14: "<row_2_col_1>"}  # fmt: skip


def tiny_idefics3(folder: Path, seed: int = 0, family: str = "Idefics3") -> Path:
    """Tiles of 28 with sixteen patches, four of which make a token. Some tiles have no token of their own: their names
    are spelled."""
    import transformers

    torch.manual_seed(seed)
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=28,
                  patch_size=7, initializer_range=0.3)  # fmt: skip
    text = transformers.LlamaConfig(**TEXT, head_dim=16)
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=2, tie_word_embeddings=False
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    processor = dict(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder, IDEFICS_TOKENS)
    return folder


def tiny_smolvlm(folder: Path, seed: int = 0) -> Path:
    return tiny_idefics3(folder, seed, "SmolVLM")


def idefics_oracle(
    folder: Path, input_ids: list[int], images: list[bytes], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """As `qwen_oracle`; each image's tokens are spelled out as transformers' processor does."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForImageTextToText
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    seen: dict[str, Any] = {}
    if images:
        processor = Idefics3ImageProcessorPil.from_pretrained(folder)
        made = processor([decoded(images)], return_tensors="pt", return_row_col_info=True)
        seen = dict(pixel_values=made["pixel_values"], pixel_attention_mask=made["pixel_attention_mask"])
        for rows, columns in zip(made["rows"][0], made["cols"][0], strict=True):
            text = get_image_prompt_string(rows, columns, 4, *(IDEFICS_TOKENS[i] for i in (BEGIN, IMAGE, END)))
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            start = next(i for i in range(len(input_ids)) if input_ids[i : i + len(ids)] == [IMAGE] * len(ids))
            input_ids = [*input_ids[:start], *(-i for i in ids), *input_ids[start + len(ids) :]]
    return continued(model, [abs(i) for i in input_ids], num_tokens, seen)


def continued(
    model: Any, input_ids: list[int], num_tokens: int, seen: dict[str, Any]
) -> tuple[list[int], torch.Tensor]:
    """Greedily; what is seen goes into the first step."""
    tokens, cache, logits = torch.tensor([input_ids]), None, []
    with torch.inference_mode():
        for _ in range(num_tokens):
            out = model(tokens, past_key_values=cache, use_cache=True, **seen)
            cache, seen = out.past_key_values, {}
            logits.append(out.logits[0, -1])
            tokens = out.logits[:, -1:].argmax(-1)
    return [int(row.argmax()) for row in logits], torch.stack(logits)


def tiny_idefics2(folder: Path, seed: int = 0) -> Path:
    """Parts of 28 by 28: transformers pads all images of a prompt to one size, which would give edges more patches."""
    from transformers import Idefics2Config, Idefics2ForConditionalGeneration

    torch.manual_seed(seed)
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=35,
                  patch_size=7, initializer_range=0.3)  # fmt: skip
    perceiver = dict(hidden_size=96, resampler_n_latents=5, resampler_depth=2, resampler_n_heads=4,
                     resampler_head_dim=8, num_key_value_heads=2, initializer_range=0.15)  # fmt: skip
    text = dict(TEXT, model_type="mistral", head_dim=16, sliding_window=None, initializer_range=0.2)
    config = Idefics2Config(text_config=text, vision_config=vision, perceiver_config=perceiver, image_token_id=IMAGE,
                            tie_word_embeddings=False)  # fmt: skip
    model = Idefics2ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("latents"):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    processor = dict(size={"shortest_edge": 28, "longest_edge": 28}, do_image_splitting=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder, {IMAGE: "<image>", BEGIN: "<fake_token_around_image>"})
    return folder


def idefics2_oracle(
    folder: Path, input_ids: list[int], images: list[bytes], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """As `qwen_oracle`."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    seen: dict[str, Any] = {}
    if images:
        made = Idefics2ImageProcessorPil.from_pretrained(folder)([decoded(images)], return_tensors="pt")
        seen = dict(pixel_values=made["pixel_values"], pixel_attention_mask=made["pixel_attention_mask"])
        spelled = [BEGIN, *[*[IMAGE] * 5, BEGIN] * 5]
        for _ in images:
            start = input_ids.index(IMAGE)
            assert input_ids[start : start + len(spelled)] == [IMAGE] * len(spelled)
            input_ids = [*input_ids[:start], *(-i for i in spelled), *input_ids[start + len(spelled) :]]
    return continued(model, [abs(i) for i in input_ids], num_tokens, seen)
