"""What the rules of all families have in common: sizes of images, and how the numbers of their pixels are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from legato.common.errors import LegatoError

# CLIP's mean and standard deviation of each channel.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
STANDARD = (0.5, 0.5, 0.5)  # SigLIP's mean and deviation of each channel


class UnsupportedImageShape(LegatoError):
    """The model family does not accept images of this shape."""


@dataclass(frozen=True, slots=True)
class Size:
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class PixelNormalization:
    """A channel value from 0 to 255 becomes (value * scale - mean) / std."""

    scale: float = 1 / 255
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def of(
        cls, processor: dict[str, Any], mean: tuple[float, ...] = CLIP_MEAN, std: tuple[float, ...] = CLIP_STD
    ) -> PixelNormalization:
        """`mean` and `std` are the family's own, for a processor that does not say."""
        return cls(
            float(processor.get("rescale_factor") or 1 / 255),
            tuple(map(float, processor.get("image_mean") or mean)),
            tuple(map(float, processor.get("image_std") or std)),
        )


class PromptText:
    """How a prompt is written around its images: most families take it as it comes."""

    __slots__ = ()
    marker: ClassVar[str]  # of an image in a prompt without a chat template
    adds_special_tokens: ClassVar[bool] = True  # to prompts that no chat template made
    is_in_text: ClassVar[bool] = True  # whether the tokens of an image are in the place of its marker

    def written(self, text: str) -> str:
        """`text` has the family's marker for each image."""
        return text

    def placed(self, ids: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens of a prompt whose images have `counts` tokens, and where each image begins."""
        token_id: int = self.token_id  # type: ignore[attr-defined]
        return expand_placeholders(ids, token_id, counts)


def expand_placeholders(ids: Sequence[int], token_id: int, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """A prompt with each placeholder `token_id` repeated once per token of its image, and their start positions."""
    expanded: list[int] = []
    starts: list[int] = []
    for number in ids:
        if number != token_id:
            expanded.append(number)
            continue
        starts.append(len(expanded))
        expanded += [token_id] * counts[len(starts) - 1]
    return expanded, starts
