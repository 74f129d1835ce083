"""Resized dimensions and token counts of images, computed from width and height.

The router needs the counts to know the length of a prompt; the server resizes and tiles images by the same rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from legato.common.errors import ModelFileError
from legato.modelfiles.files import ModelFiles, read_json
from legato.vision.cross import FlamingoRules, MllamaRules
from legato.vision.gemma import Gemma3Rules, PaliGemmaRules, SquareRules
from legato.vision.idefics import Idefics2Rules, IdeficsRules
from legato.vision.llama4 import Llama4Rules
from legato.vision.sizes import PixelNormalization as PixelNormalization
from legato.vision.sizes import PromptText
from legato.vision.sizes import Size as Size
from legato.vision.sizes import UnsupportedImageShape as UnsupportedImageShape

# LLaVA-NeXT's default grid resolutions (height, width), used if config.json has none.
LLAVA_RESOLUTIONS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True, slots=True)
class QwenRules(PromptText):
    """Qwen2-VL: the aspect ratio is kept. Sides become multiples of a cell, and each cell is one token."""

    token_id: int
    normalization: PixelNormalization
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patch: int = 14
    merge: int = 2  # patches along each side of a cell
    frames: int = 2  # an image is a video of this many identical frames
    # Placeholder of an image in a prompt without a chat template.
    marker: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"
    # As in Qwen's own preprocessing.
    max_aspect_ratio: ClassVar[int] = 200

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any]) -> QwenRules:
        size = processor.get("size") or {}
        vision = config.get("vision_config") or {}
        configured = {
            "min_pixels": processor.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": processor.get("max_pixels") or size.get("longest_edge"),
            "patch": vision.get("patch_size"),
            "merge": vision.get("spatial_merge_size"),
            "frames": vision.get("temporal_patch_size"),
        }
        given = {name: int(value) for name, value in configured.items() if value}
        return cls(int(config.get("image_token_id", 151655)), PixelNormalization.of(processor), **given)

    def resized(self, size: Size) -> Size:
        """The nearest size in whole cells with an area between `min_pixels` and `max_pixels`."""
        height, width, cell = size.height, size.width, self.patch * self.merge
        if max(height, width) > self.max_aspect_ratio * min(height, width):
            raise UnsupportedImageShape(f"the aspect ratio is greater than {self.max_aspect_ratio}")
        tall, wide = round(height / cell) * cell, round(width / cell) * cell
        if tall * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            tall, wide = (max(cell, math.floor(side / shrink / cell) * cell) for side in (height, width))
        elif tall * wide < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * stretch / cell) * cell for side in (height, width))
        return Size(tall, wide)

    def shape(self, size: Size) -> Size:
        """Rows and columns of cells."""
        resized, cell = self.resized(size), self.patch * self.merge
        return Size(resized.height // cell, resized.width // cell)

    def num_tokens(self, size: Size) -> int:
        shape = self.shape(size)
        return shape.height * shape.width

    def largest(self, max_tokens: int) -> Size:
        """Shape of about the largest image with at most `max_tokens` tokens."""
        side = math.isqrt(min(max_tokens, self.max_pixels // (self.patch * self.merge) ** 2))
        return Size(side, side)


@dataclass(frozen=True, slots=True)
class LlavaNextRules(PromptText):
    """LLaVA-NeXT: an image is fitted into the best of a few resolutions, which consist of square tiles."""

    token_id: int
    normalization: PixelNormalization
    resolutions: tuple[Size, ...]
    tile: int = 336
    patch: int = 14
    marker: ClassVar[str] = "<image>"

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any]) -> LlavaNextRules:
        vision = config.get("vision_config") or {}
        resolutions = config.get("image_grid_pinpoints") or LLAVA_RESOLUTIONS
        configured = {"tile": vision.get("image_size"), "patch": vision.get("patch_size")}
        return cls(
            int(config.get("image_token_index", config.get("image_token_id", 32000))),
            PixelNormalization.of(processor),
            tuple(Size(int(height), int(width)) for height, width in resolutions),
            **{name: int(value) for name, value in configured.items() if value},
        )

    def best(self, size: Size) -> Size:
        """The resolution that keeps most of the image's pixels, and of equals the one with the least padding."""

        def score(resolution: Size) -> tuple[int, int]:
            scale = min(resolution.width / size.width, resolution.height / size.height)
            kept = min(int(size.width * scale) * int(size.height * scale), size.width * size.height)
            return kept, kept - resolution.width * resolution.height

        return max(self.resolutions, key=score)

    def resized(self, size: Size) -> Size:
        """Size of the image within its resolution; the rest is padding."""
        resolution = self.best(size)
        across, down = resolution.width / size.width, resolution.height / size.height
        if across < down:
            return Size(min(math.ceil(size.height * across), resolution.height), resolution.width)
        return Size(resolution.height, min(math.ceil(size.width * down), resolution.width))

    def padding(self, size: Size) -> tuple[int, int]:
        """Rows and columns of padding patches on either side, which are dropped."""
        resolution = self.best(size)
        rows, columns = resolution.height // self.patch, resolution.width // self.patch
        if size.width / size.height > columns / rows:
            return (rows - int(round(size.height * (columns / size.width), 7))) // 2, 0
        return 0, (columns - int(round(size.width * (rows / size.height), 7))) // 2

    def shape(self, size: Size) -> Size:
        return size

    def num_tokens(self, size: Size) -> int:
        resolution, (top, left) = self.best(size), self.padding(size)
        rows, columns = resolution.height // self.patch - 2 * top, resolution.width // self.patch - 2 * left
        return (self.tile // self.patch) ** 2 + rows * (columns + 1)

    def largest(self, max_tokens: int) -> Size:
        """An image that fills the largest resolution."""
        return max(self.resolutions, key=lambda resolution: resolution.height * resolution.width)


ImageRules = (
    QwenRules | LlavaNextRules | IdeficsRules | Idefics2Rules | SquareRules | MllamaRules | FlamingoRules | Llama4Rules
)


TokenizerRules = IdeficsRules | Idefics2Rules | Gemma3Rules | PaliGemmaRules | FlamingoRules | Llama4Rules
# Families whose images have tokens of text among theirs, or whose prompts are written around them.
WITH_TOKENS: dict[str, type[TokenizerRules]] = {
    "gemma3": Gemma3Rules,
    "idefics": FlamingoRules,
    "idefics2": Idefics2Rules,
    "idefics3": IdeficsRules,
    "llama4": Llama4Rules,
    "paligemma": PaliGemmaRules,
    "smolvlm": IdeficsRules,
}


def image_rules(files: ModelFiles) -> ImageRules | None:
    """The rules of a vision model, or None for a text model."""
    if files.weight_format != "safetensors":
        return None  # the vision encoder of a GGUF model is in a second file
    config = files.config()
    families: dict[str, type[QwenRules] | type[LlavaNextRules] | type[MllamaRules]] = {
        "mllama": MllamaRules,
        "qwen2_vl": QwenRules,
        "qwen2_5_vl": QwenRules,
        "qwen3_vl": QwenRules,
        "llava_next": LlavaNextRules,
    }
    kind = str(config.get("model_type"))
    family = families.get(kind)
    if family is None and (kind not in WITH_TOKENS or (kind == "gemma3" and not config.get("vision_config"))):
        return None
    processor = read_json(files.path / "preprocessor_config.json", optional=True)
    if not processor:
        processor = read_json(files.path / "processor_config.json", optional=True).get("image_processor") or {}
    try:
        if family is None:
            return WITH_TOKENS[kind].of(config, processor, files.tokenizer())
        return family.of(config, processor)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelFileError(f"{files.path}: invalid image processor configuration: {error}") from None
