"""Vision towers as CUDA graphs: an image is some two thousand launches of Qwen2.5-VL's, which take the host longer than
the device takes to compute them.

A graph is captured for a shape of images, the second time that one comes: many clients send images of one size. Where
they send all sizes, a capture for most images would take longer than the graphs save: a graph is given up for another
only when it was not used for a while.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from legato.server.graphs.decode import Replay
from legato.server.rows import to_device

logger = logging.getLogger(__name__)

# Shapes with graphs; shapes that were seen once; and how many images of other shapes make a graph one that is not used.
MOST_GRAPHS = 8
MOST_SEEN = 256
UNUSED_IMAGES = 256

# Of an image: the shape of its pixels, and whatever else its embeddings depend on.
ShapeKey: TypeAlias = tuple[object, ...]
Encode: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
TowerRecord: TypeAlias = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]


class TowerGraphs:
    def __init__(self, record: TowerRecord) -> None:
        self._record = record
        self._is_stopped = False
        self._seen: OrderedDict[ShapeKey, None] = OrderedDict()
        # Where pixels go, how to compute, where the embeddings are then. Least recently used first.
        self._graphs: OrderedDict[ShapeKey, tuple[torch.Tensor, Replay, torch.Tensor]] = OrderedDict()
        # Which image used each of them last.
        self._last_used: dict[ShapeKey, int] = {}
        self._num_images = 0

    def run(self, key: ShapeKey, pixels: np.ndarray, device: torch.device, encode: Encode) -> torch.Tensor:
        """What `encode` makes of these pixels. It must depend on nothing else that changes, for images of one key."""
        arrived = to_device(pixels, device)
        self._num_images += 1
        if key not in self._graphs and not (self._is_due(key) and self._capture(key, arrived, encode)):
            return encode(arrived)
        self._graphs.move_to_end(key)
        self._last_used[key] = self._num_images
        inputs, replay, embeddings = self._graphs[key]
        inputs.copy_(arrived)
        replay()
        return embeddings.clone()  # the next replay of any graph may overwrite them

    def _is_due(self, key: ShapeKey) -> bool:
        """It came before, and there is a place for its graph. Remembers it if not."""
        if self._is_stopped or key in self._seen:
            return not self._is_stopped and self._has_place
        self._seen[key] = None
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return False

    @property
    def _has_place(self) -> bool:
        if len(self._graphs) < MOST_GRAPHS:
            return True
        return self._num_images - self._last_used[next(iter(self._graphs))] > UNUSED_IMAGES

    def _capture(self, key: ShapeKey, inputs: torch.Tensor, encode: Encode) -> bool:
        if len(self._graphs) >= MOST_GRAPHS:
            oldest, _ = self._graphs.popitem(last=False)
            del self._last_used[oldest]
        try:
            encode(inputs)  # compiles and warms what a capture must not
            replay, embeddings = self._record(lambda: encode(inputs))
        except (RuntimeError, MemoryError) as error:
            self._is_stopped = True
            cause = str(error).partition("\n")[0]
            logger.warning("CUDA graph capture of the vision tower failed (%s); images are encoded eagerly.", cause)
            return False
        self._graphs[key] = inputs, replay, embeddings
        return True
