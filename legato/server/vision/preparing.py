"""Images are decoded and resized in threads, all of a step at once, while the device computes the step before."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from legato.server.vision.pixels import host_pixels
from legato.vision.files import decode
from legato.vision.rules import ImageRules, Size

# Pillow releases the interpreter's lock while it decodes and resizes.
NUM_THREADS = 8


@dataclass(frozen=True, slots=True)
class PreparedImage:
    shape: Size  # in tokens
    pixels: np.ndarray  # as `host_pixels` returns them


class ImagePreparation:
    def __init__(self, rules: ImageRules) -> None:
        self._rules = rules
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="images")  # started when they are needed
        self._started: dict[bytes, Future[PreparedImage]] = {}

    def start(self, images: Mapping[bytes, bytes]) -> None:
        """Of image files by their digests. What was started before and never taken is dropped."""
        self._started = {digest: self._threads.submit(self._prepare, data) for digest, data in images.items()}

    def take(self, digest: bytes, data: bytes) -> PreparedImage:
        started = self._started.pop(digest, None)
        return self._prepare(data) if started is None else started.result()

    def _prepare(self, data: bytes) -> PreparedImage:
        image = decode(data)
        return PreparedImage(self._rules.shape(Size(image.height, image.width)), host_pixels(image, self._rules))
