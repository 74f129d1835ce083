"""Images are decoded and resized in threads, from the moment that their step arrives: steps before it may still have to
be launched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np

from legato.server.vision.pixels import host_pixels
from legato.vision.files import decode
from legato.vision.rules import ImageRules, Size

# Pillow releases the interpreter's lock while it decodes and resizes.
NUM_THREADS = 8
# Images that nobody has taken yet. Those of steps that were never launched are not dropped either.
MOST_STARTED = 256


@dataclass(frozen=True, slots=True)
class PreparedImage:
    shape: Size  # in tokens
    pixels: np.ndarray  # as `host_pixels` returns them


class ImagePreparation:
    def __init__(self, rules: ImageRules) -> None:
        self._rules = rules
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="images")  # started when they are needed
        self._started: OrderedDict[bytes, Future[PreparedImage]] = OrderedDict()
        self._lock = Lock()

    def start(self, images: Mapping[bytes, bytes]) -> None:
        """Of image files by their digests, from any thread."""
        with self._lock:
            for digest, data in images.items():
                if digest not in self._started:
                    self._started[digest] = self._threads.submit(self._prepare, data)
            while len(self._started) > MOST_STARTED:
                self._started.popitem(last=False)

    def take(self, digest: bytes, data: bytes) -> PreparedImage:
        with self._lock:
            started = self._started.pop(digest, None)
        return self._prepare(data) if started is None else started.result()

    def drop(self, digests: Iterable[bytes]) -> None:
        """Nobody takes these any more."""
        with self._lock:
            for digest in digests:
                if (started := self._started.pop(digest, None)) is not None:
                    started.cancel()

    def _prepare(self, data: bytes) -> PreparedImage:
        image = decode(data)
        return PreparedImage(self._rules.shape(Size(image.height, image.width)), host_pixels(image, self._rules))
