"""Decompression bombs, damaged, animated and other files (row 25 of the fault table)."""

from __future__ import annotations

import io
import resource
import struct
import zlib
from typing import Any

import pytest

from legato.vision.files import InvalidImage, declared_size, decode
from legato.vision.rules import Size

pytest.importorskip("PIL", reason="pictures need Pillow, the extra `vision`")

LIMIT = 1 << 20


def saved(kind: str, width: int = 40, height: int = 30, mode: str = "RGB", **options: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (width, height), 77).save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_bomb(side: int) -> bytes:
    """A few kilobytes that declare side² pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("GIF", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_the_size_is_read_from_the_header(kind: str, options: dict[str, Any]) -> None:
    data = saved(kind, 300, 211, **options)
    assert declared_size(data) == Size(211, 300)
    assert decode(data, LIMIT).size == (300, 211)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "I;16"])
def test_every_colour_mode_becomes_rgb(mode: str) -> None:
    assert decode(saved("PNG", mode=mode)).mode == "RGB"


def test_one_pixel_is_a_valid_image() -> None:
    assert decode(saved("PNG", 1, 1), LIMIT).size == (1, 1)


def test_the_exif_orientation_is_applied() -> None:
    from PIL import Image

    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter
    assert decode(saved("JPEG", 40, 30, exif=turned)).size == (30, 40)


@pytest.mark.parametrize("side", [50_000, 2**31 - 1])
def test_a_decompression_bomb_is_refused_by_its_header(side: int) -> None:
    bomb = png_bomb(side)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidImage, match=f"has {side} x {side} pixels, more than the limit of {LIMIT}"):
        decode(bomb, LIMIT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kilobytes


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
def test_a_truncated_file_is_refused_with_our_message(kind: str) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(file, kind)
    data = file.getvalue()
    for length in (0, 3, 8, 12, 20, 28, 40, len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(InvalidImage, match=r"^(is not|is truncated|is damaged|has no)"):
            decode(data[:length], LIMIT)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animated_image_is_refused(kind: str) -> None:
    from PIL import Image

    frames = [Image.new("RGB", (20, 20), (shade, 0, 0)) for shade in (0, 100, 200)]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    with pytest.raises(InvalidImage, match="is animated"):
        decode(file.getvalue(), LIMIT)


def test_a_tiff_file_of_the_other_byte_order_has_the_same_size() -> None:
    width, height = struct.pack(">HHIHH", 256, 3, 1, 300, 0), struct.pack(">HHII", 257, 4, 1, 211)
    assert declared_size(b"MM\0*" + struct.pack(">IH", 8, 2) + width + height) == Size(211, 300)


def test_a_tiff_file_without_a_size_is_refused() -> None:
    with pytest.raises(InvalidImage, match="its first directory has no size"):
        declared_size(b"II*\0" + struct.pack("<IH", 8, 0))


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg/>", b"%PDF-1.7", b"II+\x00", b"\x00" * 64, b"BM" + bytes(60)])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidImage, match="is not a PNG, JPEG, GIF, WebP or TIFF file"):
        decode(data, LIMIT)


def test_a_webp_file_with_two_sizes_is_refused() -> None:
    data = bytearray(saved("WEBP", 40, 30, "RGBA"))
    assert data[12:16] == b"VP8X"
    data[24:27] = (9).to_bytes(3, "little")
    with pytest.raises(InvalidImage):
        decode(bytes(data), LIMIT)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_decoded_or_refused(seed: int) -> None:
    import random

    chance = random.Random(seed)
    data = bytearray(saved(chance.choice(["PNG", "JPEG", "GIF", "WEBP", "TIFF"]), 33, 21))
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    try:
        assert decode(bytes(data), LIMIT).mode == "RGB"
    except InvalidImage as refused:
        assert "\n" not in str(refused) and "PIL" not in str(refused)
