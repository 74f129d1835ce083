"""How large a picture becomes for a model, and how many tokens that makes: arithmetic from width and height.

The router counts with it, because a prompt's length must be known before anybody looks at a picture; the server cuts
pictures by it. `image_rules` says which rules a model has, if it sees at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from legato.common.errors import LegatoError, ModelFileError
from legato.modelfiles.files import ModelFiles, read_json

# What CLIP was trained with: the mean and the spread of each colour.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Height and width of LLaVA-NeXT's formats, where config.json does not say.
LLAVA_FORMATS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


class UnfitImage(LegatoError):
    """No model of this family takes pictures of this shape."""


@dataclass(frozen=True, slots=True)
class Size:
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Colours:
    """A colour from 0 to 255 becomes (colour * scale - mean) / std."""

    scale: float = 1 / 255
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def of(cls, processor: dict[str, Any]) -> Colours:
        return cls(
            float(processor.get("rescale_factor") or 1 / 255),
            tuple(map(float, processor.get("image_mean") or CLIP_MEAN)),
            tuple(map(float, processor.get("image_std") or CLIP_STD)),
        )


@dataclass(frozen=True, slots=True)
class QwenRules:
    """Qwen2-VL: a picture keeps its shape. Its sides become multiples of a cell, and each cell is one token."""

    token_id: int
    colours: Colours
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patch: int = 14
    merge: int = 2  # patches along each side of a cell
    frames: int = 2  # a picture is a film of so many equal frames
    # What stands for a picture in a prompt that has no chat template around it.
    marker: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"
    # Thinner ones would become a line of cells longer than any other picture.
    most_elongated: ClassVar[int] = 200

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any]) -> QwenRules:
        size = processor.get("size") or {}
        vision = config.get("vision_config") or {}
        said = {
            "min_pixels": processor.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": processor.get("max_pixels") or size.get("longest_edge"),
            "patch": vision.get("patch_size"),
            "merge": vision.get("spatial_merge_size"),
            "frames": vision.get("temporal_patch_size"),
        }
        given = {name: int(value) for name, value in said.items() if value}
        return cls(int(config.get("image_token_id", 151655)), Colours.of(processor), **given)

    def resized(self, size: Size) -> Size:
        """The nearest size in whole cells whose area is between the smallest and the largest."""
        height, width, cell = size.height, size.width, self.patch * self.merge
        if max(height, width) > self.most_elongated * min(height, width):
            raise UnfitImage(f"one side is more than {self.most_elongated} times as long as the other")
        tall, wide = round(height / cell) * cell, round(width / cell) * cell
        if tall * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            tall, wide = (max(cell, math.floor(side / shrink / cell) * cell) for side in (height, width))
        elif tall * wide < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * stretch / cell) * cell for side in (height, width))
        return Size(tall, wide)

    def shape(self, size: Size) -> Size:
        """Of the picture in the language model: its cells."""
        resized, cell = self.resized(size), self.patch * self.merge
        return Size(resized.height // cell, resized.width // cell)

    def num_tokens(self, size: Size) -> int:
        shape = self.shape(size)
        return shape.height * shape.width

    def largest(self, max_tokens: int) -> Size:
        """Shape of the largest picture that fits into so many tokens, more or less."""
        side = math.isqrt(min(max_tokens, self.max_pixels // (self.patch * self.merge) ** 2))
        return Size(side, side)


@dataclass(frozen=True, slots=True)
class LlavaNextRules:
    """LLaVA-NeXT: a picture is fitted into the best of a few formats, which are made of square tiles."""

    token_id: int
    colours: Colours
    formats: tuple[Size, ...]
    tile: int = 336
    patch: int = 14
    marker: ClassVar[str] = "<image>"

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any]) -> LlavaNextRules:
        vision = config.get("vision_config") or {}
        formats = config.get("image_grid_pinpoints") or LLAVA_FORMATS
        said = {"tile": vision.get("image_size"), "patch": vision.get("patch_size")}
        return cls(
            int(config.get("image_token_index", config.get("image_token_id", 32000))),
            Colours.of(processor),
            tuple(Size(int(height), int(width)) for height, width in formats),
            **{name: int(value) for name, value in said.items() if value},
        )

    def best(self, size: Size) -> Size:
        """The format that shows most of a picture's pixels, and of equals the one with the least waste."""

        def worth(form: Size) -> tuple[int, int]:
            scale = min(form.width / size.width, form.height / size.height)
            shown = min(int(size.width * scale) * int(size.height * scale), size.width * size.height)
            return shown, shown - form.width * form.height

        return max(self.formats, key=worth)

    def resized(self, size: Size) -> Size:
        """What a picture becomes inside its format; the rest is padding."""
        form = self.best(size)
        across, down = form.width / size.width, form.height / size.height
        if across < down:
            return Size(min(math.ceil(size.height * across), form.height), form.width)
        return Size(form.height, min(math.ceil(size.width * down), form.width))

    def padding(self, size: Size) -> tuple[int, int]:
        """Rows and columns of patches, on either side, that are left out because they show nothing."""
        form = self.best(size)
        rows, columns = form.height // self.patch, form.width // self.patch
        if size.width / size.height > columns / rows:
            return (rows - int(round(size.height * (columns / size.width), 7))) // 2, 0
        return 0, (columns - int(round(size.width * (rows / size.height), 7))) // 2

    def shape(self, size: Size) -> Size:
        return size

    def num_tokens(self, size: Size) -> int:
        form, (top, left) = self.best(size), self.padding(size)
        rows, columns = form.height // self.patch - 2 * top, form.width // self.patch - 2 * left
        return (self.tile // self.patch) ** 2 + rows * (columns + 1)

    def largest(self, max_tokens: int) -> Size:
        """One that fills the largest format; there is none much smaller."""
        return max(self.formats, key=lambda form: form.height * form.width)


ImageRules = QwenRules | LlavaNextRules


def spread_marks(ids: Sequence[int], token_id: int, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """A prompt in which each mark `token_id` has become as many as its picture has tokens, and where each begins."""
    spread: list[int] = []
    starts: list[int] = []
    for number in ids:
        if number != token_id:
            spread.append(number)
            continue
        starts.append(len(spread))
        spread += [token_id] * counts[len(starts) - 1]
    return spread, starts


def image_rules(files: ModelFiles) -> ImageRules | None:
    """Those of the model, or None if it does not see."""
    if files.weight_format != "safetensors":
        return None  # GGUF files have no eyes: theirs are in a second file
    config = files.config()
    families: dict[str, type[QwenRules] | type[LlavaNextRules]] = {"qwen2_vl": QwenRules, "llava_next": LlavaNextRules}
    family = families.get(str(config.get("model_type")))
    if family is None:
        return None
    processor = read_json(files.path / "preprocessor_config.json", optional=True)
    if not processor:
        processor = read_json(files.path / "processor_config.json", optional=True).get("image_processor") or {}
    try:
        return family.of(config, processor)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelFileError(f"{files.path}: the description of the image processor makes no sense: {error}") from None
