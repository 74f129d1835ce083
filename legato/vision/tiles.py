"""How Llama 3.2 Vision and Llama 4 fit an image into tiles: without distortion, and never enlarged beyond a tile."""

from __future__ import annotations

import math

from legato.vision.sizes import Size


def tile_layouts(max_tiles: int) -> list[Size]:
    """All rows and columns of up to so many tiles, in the order of their numbers in Llama 3.2 Vision."""
    counts = range(1, max_tiles + 1)
    return [Size(tall, wide) for tall in counts for wide in counts if tall * wide <= max_tiles]


def fitting_tiles(size: Size, tile: int, max_tiles: int) -> Size:
    """Of the layouts that enlarge the image least, or else of those that shrink it least, the smallest."""

    def scale(layout: Size) -> float:
        return min(layout.height * tile / size.height, layout.width * tile / size.width)

    layouts = tile_layouts(max_tiles)
    enlarging = [scale(layout) for layout in layouts if scale(layout) >= 1]
    best = min(enlarging) if enlarging else max(map(scale, layouts))
    fitting = [layout for layout in layouts if scale(layout) == best]
    return min(fitting, key=lambda layout: layout.height * layout.width)


def fitted_size(size: Size, layout: Size, tile: int) -> Size:
    """Of an image within its tiles."""
    tall = min(max(size.height, tile), layout.height * tile)
    wide = min(max(size.width, tile), layout.width * tile)
    down, across = tall / size.height, wide / size.width
    if across < down:
        return Size(min(math.floor(size.height * across) or 1, tall), wide)
    return Size(tall, min(math.floor(size.width * down) or 1, wide))
