"""Models that keep their matrices quantized on a CPU too, as they are on a GPU, and tiny models that are quantized as
large ones are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from legato.layers.shard import Shard
from legato.models import checkpoint
from legato.quantization import method
from tests.models.answers import Answers, answer


@contextmanager
def no_product_is_small() -> Iterator[None]:
    with patch.object(method, "SMALL_PRODUCT", 0):
        yield


@contextmanager
def kept_quantized() -> Iterator[None]:
    with patch.object(checkpoint, "DEQUANTIZED_ON", set()):
        yield


def answer_kept(
    folder: Path, requests: list[list[int]], shard: Shard | None = None, quantize: str | None = None
) -> Answers:
    with kept_quantized(), no_product_is_small():
        return answer(folder, requests, shard, quantize)
