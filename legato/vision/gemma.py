"""Images in Gemma 3 and PaliGemma: each is resized to one square and becomes the same number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tokenizers import Tokenizer

from legato.vision.sizes import STANDARD, PixelNormalization, PromptText, Size

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers of its filters


@dataclass(frozen=True)
class SquareRules(PromptText):
    token_id: int  # the one that stands for an image in a prompt
    normalization: PixelNormalization
    side: int  # pixels
    resample: int
    ids: tuple[int, ...]  # the tokens of an image
    soft_id: int  # those of them that the tower makes

    def shape(self, size: Size) -> Size:
        return Size(self.side, self.side)

    def num_tokens(self, size: Size) -> int:
        return len(self.ids)

    def image_ids(self, shape: Size) -> list[int]:
        return list(self.ids)

    def largest(self, max_tokens: int) -> Size:
        return Size(self.side, self.side)


class Gemma3Rules(SquareRules):
    """Between the tokens of beginning and end; in the text an empty line is before the one and behind the other."""

    marker: ClassVar[str] = "<start_of_image>"

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any], tokenizer: Tokenizer) -> Gemma3Rules:
        if processor.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan is not supported: set it to false")
        begin, soft, end = (
            int(config.get(f"{name}_token_index", config.get(f"{name}_token_id", default)))
            for name, default in (("boi", 255_999), ("image", 262_144), ("eoi", 256_000))
        )
        if tokenizer.token_to_id(cls.marker) != begin:
            raise ValueError(f"the tokenizer's {cls.marker} is not config.json's boi_token_index, {begin}")
        count = int(config.get("mm_tokens_per_image") or 256)
        return cls(
            begin,
            PixelNormalization.of(processor, STANDARD, STANDARD),
            _side(config, processor, 896),
            int(processor.get("resample") or BILINEAR),
            (begin, *[soft] * count, end),
            soft,
        )

    def written(self, text: str) -> str:
        """White space beside the empty lines becomes part of their tokens: they are written before tokenizing."""
        return text.replace(self.marker, f"\n\n{self.marker}\n\n")


@dataclass(frozen=True)
class PaliGemmaRules(SquareRules):
    bos: str = "<bos>"
    marker: ClassVar[str] = "<image>"
    adds_special_tokens: ClassVar[bool] = False

    @classmethod
    def of(cls, config: dict[str, Any], processor: dict[str, Any], tokenizer: Tokenizer) -> PaliGemmaRules:
        side = _side(config, processor, 224)
        vision = config.get("vision_config") or {}
        count = (side // int(vision.get("patch_size") or 14)) ** 2
        token_id = int(config.get("image_token_index", config.get("image_token_id", 256_000)))
        if tokenizer.token_to_id(cls.marker) != token_id:
            raise ValueError(f"the tokenizer's {cls.marker} is not config.json's image_token_index, {token_id}")
        return cls(
            token_id,
            PixelNormalization.of(processor, STANDARD, STANDARD),
            side,
            int(processor.get("resample") or BICUBIC),
            (token_id,) * count,
            token_id,
            tokenizer.id_to_token(int(config.get("bos_token_id") or 2)) or "<bos>",
        )

    def written(self, text: str) -> str:
        """Images, the first token of text, the text, and the end of its line, as in training."""
        if self.bos in text:  # it was written so already
            return text
        end = text.rfind(self.marker) + len(self.marker) if self.marker in text else 0
        return f"{text[:end]}{self.bos}{text[end:]}\n"


def _side(config: dict[str, Any], processor: dict[str, Any], default: int) -> int:
    size = processor.get("size") or {}
    return int(size.get("height") or (config.get("vision_config") or {}).get("image_size") or default)
