"""Gemma 3 and PaliGemma with images: SigLIP's tower, a projector, and a Gemma.

Tokens of an image see each other, also those behind them; in PaliGemma all tokens of a prompt do (`layers/mutual.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.layers.norm import RMSNorm
from legato.layers.rotary import RopeConfig, Rotary
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Layer
from legato.models.gemma import Gemma, Gemma2, Gemma3, language_prefix
from legato.models.keys import Keys
from legato.models.llama import Llama, LlamaParts, LlamaShape
from legato.models.siglip import PatchTowerShape, SiglipTower
from legato.models.vision import ImageSpan
from legato.models.weights import Weights
from legato.vision.gemma import SquareRules
from legato.vision.rules import ImageRules, Size

# Of Gemma's towers, where config.json leaves them out.
TOWER = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, patch_size=14)


class SquareTower(SiglipTower):
    is_fractional = False


class GemmaWithImages(Gemma, ABC):
    """What both have: embeddings of images among those of text, which are scaled."""

    position_shifts: torch.Tensor | None = None
    image_rules: ImageRules | None = None  # written by the server
    tower: SquareTower
    whole_prompts = False

    def embed(self, step: Step) -> torch.Tensor:
        x = super().embed(step)
        return x if step.images is None else step.images.insert_into(x)

    def encode_image(self, pixels: torch.Tensor, shape: Size) -> torch.Tensor:
        rules = self.image_rules
        assert isinstance(rules, SquareRules), "the server says what stands around an image"
        ids = torch.tensor(rules.image_ids(shape), device=pixels.device)
        x = self.embedding(ids).mul_(self.embedding_factor)
        seen = self.project(self.tower(pixels)[0])
        return x.index_copy_(0, (ids == rules.soft_id).nonzero()[:, 0], seen.to(x.dtype))

    @abstractmethod
    def project(self, seen: torch.Tensor) -> torch.Tensor:
        """[patches, width of the tower] -> [tokens, hidden_size]"""

    def image_positions(self, num_tokens: int, images: Sequence[ImageSpan]) -> None:
        """As text is."""


class Gemma3WithImages(GemmaWithImages, Gemma3):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        vision = config.keys.below("vision_config")
        if not vision.raw:  # a language model alone, by the name of the whole
            return
        shape = tower_shape(vision, 896)
        self.side = round(config.keys.count("mm_tokens_per_image", default=256) ** 0.5)
        if shape.side % self.side:
            raise ModelFileError(f"config.json: {shape.side} patches a side do not make {self.side} tokens a side")
        root = weights.prefix("model.", "multi_modal_projector.mm_input_projection_weight")
        self.tower = tower(shape, weights, f"{root}vision_tower")
        name = f"{root}multi_modal_projector"
        self.norm_of_images = RMSNorm(weights.tensor(f"{name}.mm_soft_emb_norm.weight", (shape.width,)), shape.eps, 1.0)
        self.projection = weights.tensor(f"{name}.mm_input_projection_weight", (shape.width, config.hidden_size))

    def project(self, seen: torch.Tensor) -> torch.Tensor:
        """Means of square groups of patches are tokens."""
        side = self.tower.shape.side
        grid = seen.t().unflatten(1, (side, side))[None]
        pooled = F.avg_pool2d(grid, side // self.side)[0].flatten(1).t().contiguous()
        return self.norm_of_images(pooled) @ self.projection

    def groups(self, num_prompt: int, images: Sequence[ImageSpan]) -> list[tuple[int, int]]:
        """Without the tokens of beginning and end."""
        return [(image.start + 1, image.start + image.num_tokens - 1) for image in images]


class PaliGemma(GemmaWithImages, Gemma2):
    """The language model is a Gemma, in PaliGemma 2 a Gemma 2."""

    whole_prompts = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.prefix = language_prefix(weights)
        self.kind = config.keys.below("text_config").text("model_type", default="gemma")
        if self.kind not in ("gemma", "gemma2"):
            raise UnsupportedModel(
                f"PaliGemma with a language model '{self.kind}' is not supported; known: gemma, gemma2"
            )
        super().__init__(config, weights)
        shape = tower_shape(config.keys.below("vision_config"), 224)
        root = weights.prefix("model.", "multi_modal_projector.linear.weight")
        self.tower = tower(shape, weights, f"{root}vision_tower")
        self.projector = weights.linear(
            f"{root}multi_modal_projector.linear", config.hidden_size, shape.width, bias=True
        )
        # Older files have the head of the language model below it.
        weights.skip("language_model.lm_head.weight")

    def read(self, config: ModelConfig) -> LlamaShape:
        if self.kind == "gemma2":
            return Gemma2.read(self, config)
        self.logits_cap = 0.0
        return Gemma.read(self, config)

    def rope(self, config: ModelConfig) -> RopeConfig:
        return config.rope()

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        kind = Gemma2 if self.kind == "gemma2" else Llama
        return kind.layer(self, parts, name, rotary, window)

    def project(self, seen: torch.Tensor) -> torch.Tensor:
        return self.projector(seen)

    def groups(self, num_prompt: int, images: Sequence[ImageSpan]) -> list[tuple[int, int]]:
        return [(0, num_prompt)]


def tower_shape(keys: Keys, side: int) -> PatchTowerShape:
    return PatchTowerShape.of(keys.over(**TOWER, image_size=side))


def tower(shape: PatchTowerShape, weights: Weights, name: str) -> SquareTower:
    inner = f"{name}.vision_model"
    return SquareTower(shape, weights, inner if f"{inner}.post_layernorm.weight" in weights else name)
