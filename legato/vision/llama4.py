"""Images in Llama 4: fitted into up to 16 tiles, beside which the whole image stands once more, shrunk to a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tokenizers import Tokenizer

from legato.vision.gemma import BILINEAR
from legato.vision.sizes import STANDARD, PixelNormalization, PromptText, Size
from legato.vision.tiles import fitted_size, fitting_tiles

TOKENS = ("image", "image_start", "image_end", "tile_x_separator", "tile_y_separator", "patch")


@dataclass(frozen=True)
class Llama4Rules(PromptText):
    token_id: int
    normalization: PixelNormalization
    ids: tuple[int, ...]  # of `TOKENS`
    tile: int = 336
    tokens_per_tile: int = 144
    max_tiles: int = 16
    resample: int = BILINEAR
    marker: ClassVar[str] = "<|image|>"

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any], tokenizer: Tokenizer) -> Llama4Rules:
        vision, size = config.get("vision_config") or {}, processor.get("size") or {}
        found = {name: tokenizer.token_to_id(f"<|{name}|>") for name in TOKENS}
        if missing := [name for name, number in found.items() if number is None]:
            raise ValueError(f"the tokenizer has no token <|{missing[0]}|>")
        ids = tuple(number for number in found.values() if number is not None)
        tile = int(size.get("height") or vision.get("image_size") or 336)
        side = tile // int(vision.get("patch_size") or 14) * float(vision.get("pixel_shuffle_ratio") or 0.5)
        return cls(
            ids[0],
            PixelNormalization.of(processor, STANDARD, STANDARD),
            ids,
            tile=tile,
            tokens_per_tile=int(side) ** 2,
            max_tiles=int(processor.get("max_patches") or 16),
            resample=int(processor.get("resample") or BILINEAR),
        )

    @property
    def patch_id(self) -> int:
        return self.ids[-1]

    def shape(self, size: Size) -> Size:
        """Rows and columns of tiles."""
        return fitting_tiles(size, self.tile, self.max_tiles)

    def resized(self, size: Size) -> Size:
        """Of the image within its tiles; the rest is padding."""
        return fitted_size(size, self.shape(size), self.tile)

    def num_tokens(self, size: Size) -> int:
        return len(self.image_ids(self.shape(size)))

    def image_ids(self, shape: Size) -> list[int]:
        image, start, end, beside, below, patch = self.ids
        tile = [patch] * self.tokens_per_tile
        row = [*[*tile, beside] * (shape.width - 1), *tile, below]
        rows = row * shape.height if shape.height * shape.width > 1 else []
        return [start, *rows, image, *tile, end]

    def largest(self, max_tokens: int) -> Size:
        """Shape of about the largest image with at most `max_tokens` tokens."""
        count = self.max_tiles
        while count > 1 and len(self.image_ids(Size(1, count))) > max_tokens:
            count -= 1
        return Size(1, count)
