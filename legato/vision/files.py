"""From the bytes of an image file to its pixels, within limits that are checked before anything is unpacked.

A file of a few bytes may claim any size, so width and height are read from its header first. Whatever a decoder says of
a bad file stays inside: the words that people read are ours.
"""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING

from legato.common.errors import LegatoError
from legato.vision.rules import Size

if TYPE_CHECKING:
    from PIL import Image

MIMES = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
# JPEG: markers that carry the size. The four left out of C0 to CF are tables.
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# ... and those that stand alone, without a length behind them.
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})


class BadPicture(LegatoError):
    """Says what is wrong with an image file, as the end of a sentence about it."""


def has_decoder() -> bool:
    """Whether the `vision` extra is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return False
    return True


def format_of(data: bytes) -> str:
    """By its first bytes, whatever its name or its sender say."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    raise BadPicture("is no PNG, JPEG, GIF or WebP file")


def claimed_size(data: bytes) -> Size:
    """What the header says, without unpacking anything."""
    readers = {"PNG": _png_size, "JPEG": _jpeg_size, "GIF": _gif_size, "WEBP": _webp_size}
    try:
        size = readers[format_of(data)](data)
    except (struct.error, IndexError):
        raise BadPicture("ends within its header") from None
    if not (size.height and size.width):
        raise BadPicture("has no pixels")
    return size


def decode(data: bytes, max_pixels: int | None = None) -> Image.Image:
    """The picture as people see it, in RGB. `max_pixels` bounds the memory that this takes."""
    from PIL import Image, ImageOps

    size = claimed_size(data)
    if max_pixels is not None and size.height * size.width > max_pixels:
        raise BadPicture(f"has {size.width} x {size.height} pixels, more than the limit of {max_pixels}")
    kind = format_of(data)
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            is_film = kind != "JPEG" and getattr(image, "is_animated", False)
            is_as_claimed = (image.height, image.width) == (size.height, size.width)
            if not is_film and is_as_claimed:
                return ImageOps.exif_transpose(image).convert("RGB")
    except Exception:  # decoders raise whatever comes to their mind
        raise BadPicture("is damaged or cut off") from None
    raise BadPicture("is animated; send one frame of it" if is_film else "is damaged: it has two sizes")


def _png_size(data: bytes) -> Size:
    if data[12:16] != b"IHDR":
        raise BadPicture("is no PNG file: it has no header")
    width, height = struct.unpack_from(">II", data, 16)
    return Size(height, width)


def _gif_size(data: bytes) -> Size:
    width, height = struct.unpack_from("<HH", data, 6)
    return Size(height, width)


def _webp_size(data: bytes) -> Size:
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
    elif chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif chunk == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise BadPicture("is no WebP file: it has no picture")
    return Size(height, width)


def _jpeg_size(data: bytes) -> Size:
    """Segment by segment up to the one that begins a frame."""
    at = 2
    while True:
        if data[at] != 0xFF:
            raise BadPicture("is damaged: its segments do not follow each other")
        marker = data[at + 1]
        if marker == 0xFF:  # filling
            at += 1
        elif marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return Size(height, width)
        elif marker in _JPEG_ALONE:
            at += 2
        else:
            (length,) = struct.unpack_from(">H", data, at + 2)
            at += 2 + max(length, 2)
