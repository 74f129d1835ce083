"""Models that keep their matrices quantized on a CPU too, as they are on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from legato.layers.shard import Shard
from legato.models import checkpoint
from tests.models.answers import Answers, answer


@contextmanager
def kept_quantized() -> Iterator[None]:
    with patch.object(checkpoint, "DEQUANTIZED_ON", set()):
        yield


def answer_kept(
    folder: Path, requests: list[list[int]], shard: Shard | None = None, quantize: str | None = None
) -> Answers:
    with kept_quantized():
        return answer(folder, requests, shard, quantize)
