"""Idefics3 and SmolVLM: SigLIP's tower, a projector, and a Llama.

An image is cut into tiles, beside which it stands once more as a whole. Between the tokens of tiles are tokens of text
that say which one follows; they are counted among the image's own, and embedded here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.llama import Llama, LlamaShape
from legato.models.siglip import PatchTowerShape, SiglipTower
from legato.models.vision import ImageSpan
from legato.models.weights import Weights
from legato.vision.idefics import IdeficsRules
from legato.vision.rules import ImageRules, Size


class Idefics3(Llama):
    prefix = "model.text_model"
    position_shifts: torch.Tensor | None = None
    image_rules: ImageRules | None = None  # written by the server

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        shape = PatchTowerShape.of(keys.below("vision_config"))
        self.merge = keys.count("scale_factor", default=2)
        if shape.side % self.merge:
            raise ModelFileError(f"config.json: scale_factor={self.merge} does not divide {shape.side} patches")
        super().__init__(config, weights)
        self.tower = SiglipTower(shape, weights, "model.vision_model")
        self.projector = weights.linear(
            "model.connector.modality_projection.proj", config.hidden_size, shape.width * self.merge**2
        )

    def read(self, config: ModelConfig) -> LlamaShape:
        kind = config.keys.below("text_config").text("model_type", default="llama")
        if kind != "llama":
            raise UnsupportedModel(f"Idefics3 with a language model '{kind}' is not supported; known: llama")
        return LlamaShape.of(config)

    def embed(self, step: Step) -> torch.Tensor:
        x = super().embed(step)
        return x if step.images is None else step.images.insert_into(x)

    def encode_image(self, pixels: torch.Tensor, shape: Size) -> torch.Tensor:
        """Each cell of patches is a token; `shape` is in tiles."""
        rules = self.image_rules
        assert isinstance(rules, IdeficsRules), "the server says what stands between the tiles"
        side, merge = self.tower.shape.side, self.merge
        seen = self.tower(pixels).unflatten(1, (side // merge, merge, side // merge, merge))
        cells = seen.transpose(2, 3).flatten(3).flatten(1, 2)  # [tiles, cells, width merge²]
        ids = torch.tensor(rules.image_ids(shape), device=cells.device)
        x = self.embedding(ids)
        places = (ids == rules.token_id).nonzero()[:, 0]
        return x.index_copy_(0, places, self.projector(cells.flatten(0, 1)).to(x.dtype))

    def image_positions(self, num_tokens: int, images: Sequence[ImageSpan]) -> None:
        """As text is."""
