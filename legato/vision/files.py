"""Decodes image files, within limits that are checked before anything is decompressed.

A file of a few bytes may declare any size, so width and height are read from its header first. Errors of the decoder
are replaced by our own messages.
"""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING

from legato.common.errors import LegatoError
from legato.vision.rules import Size

if TYPE_CHECKING:
    from PIL import Image

MIMES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "GIF": "image/gif",
    "WEBP": "image/webp",
    "TIFF": "image/tiff",
}
# JPEG: start-of-frame markers, which contain the size. C4, C8 and CC are something else.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# ... and those without a length.
_JPEG_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
# TIFF: the byte order of a file, by its first bytes; the tags of width and height; the types of integers.
_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257
_TIFF_INTEGERS = {3: "H", 4: "I"}


class InvalidImage(LegatoError):
    """What is wrong with an image file, as a predicate whose subject is the image."""


def has_decoder() -> bool:
    """Whether the `vision` extra is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return False
    return True


def format_of(data: bytes) -> str:
    """By its magic number, not by its name or declared type."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:4] in _TIFF_ORDERS:
        return "TIFF"
    raise InvalidImage("is not a PNG, JPEG, GIF, WebP or TIFF file")


def declared_size(data: bytes) -> Size:
    """The size in the header, without decompressing anything."""
    readers = {"PNG": _png_size, "JPEG": _jpeg_size, "GIF": _gif_size, "WEBP": _webp_size, "TIFF": _tiff_size}
    try:
        size = readers[format_of(data)](data)
    except (struct.error, IndexError):
        raise InvalidImage("is truncated in its header") from None
    if not (size.height and size.width):
        raise InvalidImage("has no pixels")
    return size


def decode(data: bytes, max_pixels: int | None = None) -> Image.Image:
    """The image in RGB, with its EXIF orientation applied. `max_pixels` limits memory."""
    from PIL import Image, ImageOps

    size = declared_size(data)
    if max_pixels is not None and size.height * size.width > max_pixels:
        raise InvalidImage(f"has {size.width} x {size.height} pixels, more than the limit of {max_pixels}")
    kind = format_of(data)
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            is_animated = kind != "JPEG" and getattr(image, "is_animated", False)
            is_as_declared = (image.height, image.width) == (size.height, size.width)
            if not is_animated and is_as_declared:
                return ImageOps.exif_transpose(image).convert("RGB")
    except Exception:  # decoders raise all kinds of exceptions
        raise InvalidImage("is damaged or truncated") from None
    raise InvalidImage("is animated; send a single frame" if is_animated else "is damaged: it declares two sizes")


def _png_size(data: bytes) -> Size:
    if data[12:16] != b"IHDR":
        raise InvalidImage("is not a valid PNG file: it has no IHDR chunk")
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
        raise InvalidImage("is not a valid WebP file: it has no image chunk")
    return Size(height, width)


def _jpeg_size(data: bytes) -> Size:
    """Reads segments up to the first start-of-frame marker."""
    at = 2
    while True:
        if data[at] != 0xFF:
            raise InvalidImage("is damaged: a segment marker is missing")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return Size(height, width)
        elif marker in _JPEG_STANDALONE:
            at += 2
        else:
            (length,) = struct.unpack_from(">H", data, at + 2)
            at += 2 + max(length, 2)


def _tiff_size(data: bytes) -> Size:
    """Reads the first directory: a count, then entries of tag, type, number of values and value."""
    order = _TIFF_ORDERS[data[:4]]
    (at,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, at)
    found: dict[int, int] = {}
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, number = struct.unpack_from(f"{order}HHI", data, entry)
        if tag in (_TIFF_WIDTH, _TIFF_HEIGHT) and kind in _TIFF_INTEGERS and number == 1:
            (found[tag],) = struct.unpack_from(f"{order}{_TIFF_INTEGERS[kind]}", data, entry + 8)
    if len(found) < 2:
        raise InvalidImage("is not a valid TIFF file: its first directory has no size")
    return Size(found[_TIFF_HEIGHT], found[_TIFF_WIDTH])
