"""Images that tokens of text attend to in layers of their own: those of Mllama, and of Idefics (the first).

An image is not in the text. It has slots in the KV cache like a token, for the keys and values of those layers: all of
them come before the text, so that what a prompt begins with decides what can be shared. In the text one token stands
for the image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tokenizers import Tokenizer

from legato.vision.gemma import BICUBIC, BILINEAR
from legato.vision.sizes import STANDARD, PixelNormalization, PromptText, Size
from legato.vision.tiles import fitted_size, fitting_tiles

# Slots before the text are a multiple of this, and so is where an image begins that is not beside the one before: text
# then begins with a block of the KV cache.
ALIGNMENT = 128


@dataclass(frozen=True)
class CrossRules(PromptText, ABC):
    token_id: int  # the one that stands for an image in a prompt
    normalization: PixelNormalization
    is_in_text: ClassVar[bool] = False

    def placed(self, ids: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        starts: list[int] = []
        end, before = 0, -1
        for place, number in enumerate(ids):
            if number == self.token_id:
                starts.append(end if place == before + 1 else aligned(end))
                end, before = starts[-1] + counts[len(starts) - 1], place
        return [self.token_id] * aligned(end) + list(ids), starts

    @abstractmethod
    def shape(self, size: Size) -> Size: ...

    @abstractmethod
    def num_tokens(self, size: Size) -> int: ...

    @abstractmethod
    def largest(self, max_tokens: int) -> Size: ...


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class MllamaRules(CrossRules):
    """An image is fitted into up to `max_tiles` tiles; its shape is in tiles."""

    tile: int = 560
    patch: int = 14
    max_tiles: int = 4
    resample: int = BILINEAR
    marker: ClassVar[str] = "<|image|>"

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any]) -> MllamaRules:
        vision = config.get("vision_config") or {}
        size = processor.get("size") or {}
        return cls(
            int(config.get("image_token_index", config.get("image_token_id", 128_256))),
            PixelNormalization.of(processor, STANDARD, STANDARD),
            tile=int(size.get("height") or vision.get("image_size") or 560),
            patch=int(vision.get("patch_size") or 14),
            max_tiles=int(processor.get("max_image_tiles") or vision.get("max_num_tiles") or 4),
            resample=int(processor.get("resample") or BILINEAR),
        )

    def shape(self, size: Size) -> Size:
        return fitting_tiles(size, self.tile, self.max_tiles)

    def resized(self, size: Size) -> Size:
        """Of the image within its tiles; the rest is padding."""
        return fitted_size(size, self.shape(size), self.tile)

    def num_tokens(self, size: Size) -> int:
        shape = self.shape(size)
        return shape.height * shape.width * ((self.tile // self.patch) ** 2 + 1)

    def largest(self, max_tokens: int) -> Size:
        return Size(1, self.max_tiles)


@dataclass(frozen=True)
class FlamingoRules(CrossRules):
    """Idefics: an image is resized to a square, and becomes a number of latents."""

    side: int = 224
    count: int = 64
    resample: int = BICUBIC
    around: ClassVar[str] = "<fake_token_around_image>"
    marker: ClassVar[str] = f"{around}<image>{around}"

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any], tokenizer: Tokenizer) -> FlamingoRules:
        vision, size = config.get("vision_config") or {}, processor.get("size") or {}
        token_id = tokenizer.token_to_id("<image>")
        if token_id is None:
            raise ValueError("the tokenizer has no token <image>")
        side = int(processor.get("image_size") or size.get("height") or vision.get("image_size") or 224)
        count = (side // int(vision.get("patch_size") or 14)) ** 2 + 1
        if config.get("use_resampler"):
            count = int((config.get("perceiver_config") or {}).get("resampler_n_latents") or 64)
        return cls(token_id, PixelNormalization.of(processor), side=side, count=count)

    def written(self, text: str) -> str:
        """Images beside each other share the token between them."""
        return text.replace(self.around * 2, self.around)

    def shape(self, size: Size) -> Size:
        return Size(self.side, self.side)

    def num_tokens(self, size: Size) -> int:
        return self.count

    def largest(self, max_tokens: int) -> Size:
        return Size(self.side, self.side)
