"""Parts and tokens of images in Idefics2, and in Idefics3 and SmolVLM.

In the latter an image is enlarged to whole tiles, which are cut out, and shrunk to one more tile. In the prompt stand
the tokens of each tile behind a token with its row and column, and those of the whole image behind another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from tokenizers import Tokenizer

from legato.vision.sizes import STANDARD, PixelNormalization, PromptText, Size, UnsupportedImageShape

# No side of an image is longer.
LARGEST_SIDE = 4096
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True)
class IdeficsRules(PromptText):
    token_id: int
    normalization: PixelNormalization
    tokenizer: Tokenizer
    longest_edge: int = 1456
    tile: int = 364
    tokens_per_tile: int = 169
    splits: bool = True
    marker: ClassVar[str] = "<image>"

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any], tokenizer: Tokenizer) -> IdeficsRules:
        vision = config.get("vision_config") or {}
        tile = int((processor.get("max_image_size") or {}).get("longest_edge") or vision.get("image_size") or 364)
        cell = int(vision.get("patch_size") or 14) * int(config.get("scale_factor") or 2)
        return cls(
            int(config.get("image_token_id", 128_257)),
            PixelNormalization.of(processor, STANDARD, STANDARD),
            tokenizer,
            longest_edge=int((processor.get("size") or {}).get("longest_edge") or 4 * tile),
            tile=tile,
            tokens_per_tile=(tile // cell) ** 2,
            splits=bool(processor.get("do_image_splitting", True)),
        )

    def resized(self, size: Size) -> Size:
        """With the longest edge as the processor wants it; the other one is even, if it is not cut down again."""
        ratio = size.width / size.height
        if size.width >= size.height:
            short = int(self.longest_edge / ratio)
            wide, tall = self.longest_edge, short + short % 2
        else:
            short = int(self.longest_edge * ratio)
            wide, tall = short + short % 2, self.longest_edge
        wide, tall = max(wide, 1), max(tall, 1)
        ratio = wide / tall
        if wide >= tall and wide > LARGEST_SIDE:
            wide, tall = LARGEST_SIDE, int(LARGEST_SIDE / ratio)
        elif tall > wide and tall > LARGEST_SIDE:
            wide, tall = int(LARGEST_SIDE * ratio), LARGEST_SIDE
        return Size(max(tall, 1), max(wide, 1))

    def page(self, size: Size) -> Size:
        """Whole tiles, for an image of the `resized` size."""
        resized, tile = self.resized(size), self.tile
        ratio = resized.width / resized.height
        if not self.splits:
            return Size(tile, tile)
        if resized.width >= resized.height:
            wide = math.ceil(resized.width / tile) * tile
            return Size(math.ceil(int(wide / ratio) / tile) * tile, wide)
        tall = math.ceil(resized.height / tile) * tile
        return Size(tall, math.ceil(int(tall * ratio) / tile) * tile)

    def shape(self, size: Size) -> Size:
        """Rows and columns of tiles; none where one tile is all there is."""
        page = self.page(size)
        rows, columns = page.height // self.tile, page.width // self.tile
        return Size(0, 0) if rows == columns == 1 else Size(rows, columns)

    def num_tokens(self, size: Size) -> int:
        return len(self.image_ids(self.shape(size)))

    def image_ids(self, shape: Size) -> list[int]:
        return list(_image_ids(self, shape.height, shape.width))

    def largest(self, max_tokens: int) -> Size:
        """Shape of about the largest image with at most `max_tokens` tokens."""
        side = -(-self.longest_edge // self.tile)
        while side > 1 and len(self.image_ids(Size(side, side))) > max_tokens:
            side -= 1
        return Size(side, side) if side > 1 and self.splits else Size(0, 0)

    # Rules are compared and hashed by what they say, not by their tokenizer.
    def __hash__(self) -> int:
        return hash((self.token_id, self.tile, self.tokens_per_tile, id(self.tokenizer)))


@lru_cache(maxsize=256)
def _image_ids(rules: IdeficsRules, rows: int, columns: int) -> tuple[int, ...]:
    tile = rules.marker
    parts = []
    for row in range(1, rows + 1):
        parts += [f"{AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)]
        parts.append("\n")
    text = "".join(parts) + ("\n" if parts else "") + f"{AROUND}{WHOLE}{tile}{AROUND}"
    ids: list[int] = []
    for token_id in rules.tokenizer.encode(text, add_special_tokens=False).ids:
        ids += [token_id] * (rules.tokens_per_tile if token_id == rules.token_id else 1)
    return tuple(ids)


@dataclass(frozen=True)
class Idefics2Rules(PromptText):
    """The four quarters of an image and the image itself, each within limits of its own shape, or the latter alone."""

    token_id: int
    normalization: PixelNormalization
    around_id: int
    shortest_edge: int = 378
    longest_edge: int = 980
    tokens_per_part: int = 64
    splits: bool = True
    marker: ClassVar[str] = "<image>"

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any], tokenizer: Tokenizer) -> Idefics2Rules:
        size = processor.get("size") or {}
        around = tokenizer.token_to_id(AROUND)
        if around is None:
            raise ValueError(f"the tokenizer has no token {AROUND}")
        return cls(
            int(config.get("image_token_id", 32_001)),
            PixelNormalization.of(processor, STANDARD, STANDARD),
            around,
            shortest_edge=int(size.get("shortest_edge") or 378),
            longest_edge=int(size.get("longest_edge") or 980),
            tokens_per_part=int((config.get("perceiver_config") or {}).get("resampler_n_latents") or 64),
            splits=bool(processor.get("do_image_splitting", False)),
        )

    def boxes(self, size: Size) -> list[tuple[int, int, int, int]]:
        """Left, upper, right and lower edge of each part."""
        tall, wide, down, across = size.height, size.width, size.height // 2, size.width // 2
        whole = (0, 0, wide, tall)
        if not self.splits:
            return [whole]
        return [
            (0, 0, across, down),
            (across, 0, wide, down),
            (0, down, across, tall),
            (across, down, wide, tall),
            whole,
        ]

    def parts(self, size: Size) -> list[Size]:
        """The size that each part is resized to."""
        return [self._resized(Size(lower - upper, right - left)) for left, upper, right, lower in self.boxes(size)]

    def _resized(self, size: Size) -> Size:
        tall, wide = size.height, size.width
        if not tall or not wide:
            raise UnsupportedImageShape("it is too small to be split")
        if wide >= tall and wide > self.longest_edge:
            wide, tall = self.longest_edge, int(self.longest_edge / (wide / tall))
        elif tall > wide and tall > self.longest_edge:
            wide, tall = int(self.longest_edge * (wide / tall)), self.longest_edge
        return Size(max(tall, self.shortest_edge), max(wide, self.shortest_edge))

    def shape(self, size: Size) -> Size:
        return size

    def num_tokens(self, size: Size) -> int:
        self.parts(size)  # or it is refused
        return len(self.image_ids(size))

    def image_ids(self, shape: Size) -> list[int]:
        part = [*[self.token_id] * self.tokens_per_part, self.around_id]
        return [self.around_id, *part * (5 if self.splits else 1)]

    def largest(self, max_tokens: int) -> Size:
        return Size(2 * self.longest_edge, 2 * self.longest_edge)
