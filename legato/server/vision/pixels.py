"""From an image to the numbers that a vision tower reads, as the processors of transformers make them.

Pillow resizes, because its filters are the definition: others differ in the last bits of every pixel. What comes behind
that may be the device's work: a tower with many small patches reads eight times as many bytes as the image has.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from legato.vision.cross import FlamingoRules, MllamaRules
from legato.vision.gemma import SquareRules
from legato.vision.idefics import Idefics2Rules, IdeficsRules
from legato.vision.llama4 import Llama4Rules
from legato.vision.rules import ImageRules, LlavaNextRules, PixelNormalization, QwenRules, Size

if TYPE_CHECKING:
    from PIL.Image import Image


def pixels_of(image: Image, rules: ImageRules) -> np.ndarray:
    """All of it, on the host."""
    pixels: np.ndarray = tower_pixels(torch.from_numpy(host_pixels(image, rules)), rules).numpy()
    return pixels


def tower_pixels(pixels: torch.Tensor, rules: ImageRules) -> torch.Tensor:
    """What a tower reads, from what `host_pixels` returned."""
    return qwen_patches(pixels, rules) if isinstance(rules, QwenRules) else pixels


def host_pixels(image: Image, rules: ImageRules) -> np.ndarray:
    """The host's part: float32 that a tower can read, or bytes."""
    if isinstance(rules, SquareRules | FlamingoRules):
        return square(image, rules)
    if isinstance(rules, MllamaRules | Llama4Rules):
        tiles = padded_tiles(image, rules)
        if isinstance(rules, MllamaRules) or len(tiles) == 1:
            return tiles
        whole = image.resize((rules.tile, rules.tile), rules.resample)
        return np.concatenate((tiles, _numbers(np.asarray(whole), rules.normalization).transpose(2, 0, 1)[None]))
    if isinstance(rules, IdeficsRules):
        return idefics_tiles(image, rules)
    if isinstance(rules, Idefics2Rules):
        return idefics2_parts(image, rules)
    if isinstance(rules, QwenRules):
        return _resized(image, rules.resized(Size(image.height, image.width))).copy()  # Pillow's cannot be written
    return llava_tiles(image, rules)


def num_pixels(shape: Size, rules: ImageRules) -> tuple[int, ...]:
    """Shape of what `pixels_of` makes of an image that has this shape in the language model."""
    if isinstance(rules, SquareRules | FlamingoRules):
        return 1, 3, rules.side, rules.side
    if isinstance(rules, MllamaRules):
        return shape.height * shape.width, 3, rules.tile, rules.tile
    if isinstance(rules, Llama4Rules):
        return shape.height * shape.width + (shape.height * shape.width > 1), 3, rules.tile, rules.tile
    if isinstance(rules, IdeficsRules):
        return shape.height * shape.width + 1, 3, rules.tile, rules.tile
    if isinstance(rules, Idefics2Rules):
        sizes = rules.parts(shape)
        return len(sizes), 3, max(size.height for size in sizes), max(size.width for size in sizes)
    if not isinstance(rules, QwenRules):
        form = rules.best(shape)
        return 1 + form.height * form.width // rules.tile**2, 3, rules.tile, rules.tile
    num_patches = shape.height * shape.width * rules.merge**2
    return num_patches, 3 * rules.frames * rules.patch**2


def qwen_patches(pixels: torch.Tensor, rules: QwenRules) -> torch.Tensor:
    """[height, width, 3] of bytes -> [N, channels frames patch patch] float32: patches cell by cell, in a cell row by
    row, every frame the same."""
    colour = torch.arange(3, device=pixels.device)
    numbers = _values(rules.normalization, pixels.device)[pixels.long(), colour]
    height, width = (side // rules.patch // rules.merge for side in pixels.shape[:2])
    cells = numbers.view(height, rules.merge, rules.patch, width, rules.merge, rules.patch, 3)
    patches = cells.permute(0, 3, 1, 4, 6, 2, 5)  # rows and columns of cells, of patches in them, colours, pixels
    frames = patches[:, :, :, :, :, None].expand(*patches.shape[:5], rules.frames, rules.patch, rules.patch)
    return frames.reshape(-1, 3 * rules.frames * rules.patch * rules.patch)


@lru_cache(maxsize=8)
def _values(normalization: PixelNormalization, device: torch.device) -> torch.Tensor:
    """[256, 3] float32: what a byte of each colour becomes. Kept, because CUDA graphs read it."""
    return torch.from_numpy(_numbers(np.arange(256, dtype=np.uint8)[:, None], normalization)).to(device)


def llava_tiles(image: Image, rules: LlavaNextRules) -> np.ndarray:
    """[1 + n, 3, tile, tile] float32: the whole image, then its tiles row by row. Padding is black."""
    size, tile = Size(image.height, image.width), rules.tile
    form, fitted = rules.best(size), rules.resized(size)
    top, left = (form.height - fitted.height) // 2, (form.width - fitted.width) // 2
    page = np.zeros((form.height, form.width, 3), dtype=np.uint8)
    page[top : top + fitted.height, left : left + fitted.width] = _resized(image, fitted)
    cut = page.reshape(form.height // tile, tile, form.width // tile, tile, 3)
    tiles = np.concatenate((_resized(image, Size(tile, tile))[None], cut.swapaxes(1, 2).reshape(-1, tile, tile, 3)))
    return np.ascontiguousarray(_numbers(tiles, rules.normalization).transpose(0, 3, 1, 2))


def idefics_tiles(image: Image, rules: IdeficsRules) -> np.ndarray:
    """[n + 1, 3, tile, tile] float32: the tiles row by row, then the whole image, shrunk from what they were cut of."""
    from PIL.Image import Resampling

    size, tile = Size(image.height, image.width), rules.tile
    for target in (rules.resized(size), rules.page(size)):
        image = image.resize((target.width, target.height), Resampling.LANCZOS)
    shape, page = rules.shape(size), np.asarray(image)
    if not shape.height:
        tiles = page[None]
    else:
        cut = page.reshape(shape.height, tile, shape.width, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
        whole = np.asarray(image.resize((tile, tile), Resampling.LANCZOS))
        tiles = np.concatenate((cut, whole[None]))
    return np.ascontiguousarray(_numbers(tiles, rules.normalization).transpose(0, 3, 1, 2))


def idefics2_parts(image: Image, rules: Idefics2Rules) -> np.ndarray:
    """[n, 3, height, width] float32: the parts in the upper left corners, and zeros around them."""
    from PIL.Image import Resampling

    size = Size(image.height, image.width)
    pixels = np.zeros(num_pixels(size, rules), dtype=np.float32)
    for i, (box, part) in enumerate(zip(rules.boxes(size), rules.parts(size), strict=True)):
        resized = np.asarray(image.crop(box).resize((part.width, part.height), Resampling.BILINEAR))
        pixels[i, :, : part.height, : part.width] = _numbers(resized, rules.normalization).transpose(2, 0, 1)
    return pixels


def square(image: Image, rules: SquareRules | FlamingoRules) -> np.ndarray:
    """[1, 3, side, side] float32"""
    from PIL.Image import Resampling

    resized = np.asarray(image.resize((rules.side, rules.side), Resampling(rules.resample)))
    return np.ascontiguousarray(_numbers(resized, rules.normalization).transpose(2, 0, 1))[None]


def padded_tiles(image: Image, rules: MllamaRules | Llama4Rules) -> np.ndarray:
    """[n, 3, tile, tile] float32: the tiles row by row. Padding is black."""
    from PIL.Image import Resampling

    size, tile = Size(image.height, image.width), rules.tile
    shape, fitted = rules.shape(size), rules.resized(size)
    page = np.zeros((shape.height * tile, shape.width * tile, 3), dtype=np.uint8)
    resized = image.resize((fitted.width, fitted.height), Resampling(rules.resample))
    page[: fitted.height, : fitted.width] = np.asarray(resized)
    cut = page.reshape(shape.height, tile, shape.width, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
    return np.ascontiguousarray(_numbers(cut, rules.normalization).transpose(0, 3, 1, 2))


def _resized(image: Image, size: Size) -> np.ndarray:
    from PIL.Image import Resampling

    return np.asarray(image.resize((size.width, size.height), Resampling.BICUBIC))


def _numbers(colours: np.ndarray, how: PixelNormalization) -> np.ndarray:
    """[..., 3] of bytes -> float32, normalised."""
    scaled = (colours * how.scale).astype(np.float32)
    mean, std = (np.array(numbers, dtype=np.float32) for numbers in (how.mean, how.std))
    return (scaled - mean) / std
