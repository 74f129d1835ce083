"""A tiny random Llama 4, and what transformers makes of prompts with pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from legato.modelfiles.files import ModelFiles
from legato.server.vision.pixels import pixels_of
from legato.vision.files import decode
from legato.vision.llama4 import TOKENS
from legato.vision.rules import Size, image_rules
from tests.models.tiny_vision import TEXT, continued, write_tokenizer

FIRST = 30  # of the tokens of pictures


def text_settings() -> dict[str, Any]:
    """Experts in every other layer, the last one without positions, and a temperature that changes every 8 tokens."""
    return dict(TEXT, num_hidden_layers=4, head_dim=16, intermediate_size=64, intermediate_size_mlp=128, floor_scale=8,
                num_local_experts=4, interleave_moe_layer_step=2, attention_chunk_size=1024, pad_token_id=0,
                rope_parameters=dict(rope_type="default", rope_theta=10_000.0))  # fmt: skip


def tiny_llama4_text(folder: Path, **changes: Any) -> Path:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    _random(Llama4ForCausalLM(Llama4TextConfig(**{**text_settings(), **changes}))).save_pretrained(folder)
    write_tokenizer(folder, {})
    return folder


def tiny_llama4(folder: Path, seed: int = 0) -> Path:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    torch.manual_seed(seed)
    vision = dict(hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=28,
                  patch_size=7, projector_input_dim=40, projector_output_dim=40, vision_output_dim=40,
                  initializer_range=0.3, rope_parameters=dict(rope_type="default", rope_theta=100.0))  # fmt: skip
    config = Llama4Config(text_config=text_settings(), vision_config=vision, image_token_index=FIRST + 5)
    _random(Llama4ForConditionalGeneration(config)).save_pretrained(folder)
    processor = dict(size=dict(height=28, width=28), max_patches=6, resample=2)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder, {FIRST + i: f"<|{name}|>" for i, name in enumerate(TOKENS)})
    return folder


def _random(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith(("class_embedding", "embedding_vlm")):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            if "experts." in name:
                parameter.normal_(0, 0.3)
    return model.eval()


def llama4_oracle(
    folder: Path, input_ids: list[int], images: list[bytes], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """The pixels are ours: transformers has no processor for them without torchvision."""
    from transformers import Llama4ForConditionalGeneration

    model = Llama4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rules = image_rules(ModelFiles.open(folder))
    assert rules is not None
    pixels: list[torch.Tensor] = []
    seen: dict[str, Any] = {}
    for data in images:
        picture = decode(data)
        pixels.append(torch.from_numpy(pixels_of(picture, rules)))
        spelled = _spelled(rules.shape(Size(picture.height, picture.width)))
        start = input_ids.index(FIRST)
        assert input_ids[start : start + len(spelled)] == [FIRST] * len(spelled)
        input_ids = [*input_ids[:start], *(-i for i in spelled), *input_ids[start + len(spelled) :]]
    if images:
        seen = dict(pixel_values=torch.cat(pixels))
    return continued(model.eval(), [abs(i) for i in input_ids], num_tokens, seen)


def _spelled(shape: Size) -> list[int]:
    """By the processor of transformers; four tokens are a tile."""
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    text = Llama4Processor._prompt_split_image(None, (shape.height, shape.width), 4)
    numbers = {name: FIRST + i for i, name in enumerate(TOKENS)}
    return [numbers[name] for name in text.removeprefix("<|").removesuffix("|>").split("|><|")]
