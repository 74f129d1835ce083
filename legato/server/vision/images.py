"""The server's eyes: pictures of admitted requests become embeddings in the places of their tokens.

A picture is decoded and encoded once, when its request gets a row. What came of it stays with the row until the prompt
is computed, and for a while in a store, so that a request that was preempted, or the next turn of a conversation, does
not have to be looked at again. Pictures whose tokens are all in the prefix cache are not looked at either.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from legato.layers.step import Seen, Step
from legato.models.vision import ImageSpan, SeeingModel
from legato.pb import generate_pb2 as pb
from legato.pb import unpack_token_ids
from legato.server.rows import RowStep, to_device
from legato.server.vision.pixels import num_pixels, pixels_of
from legato.vision.files import decode
from legato.vision.rules import ImageRules, Size

# Image tokens whose embeddings are kept for requests to come: 64 MiB for a 7B model in 16 bits.
STORED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a prompt, as the language model reads it."""

    span: ImageSpan
    embeddings: torch.Tensor | None  # [num_tokens, hidden_size]; None: all of it is in the cache

    def part(self, first: int, last: int) -> tuple[int, int]:
        """The places of the sequence that are the picture's and in [first, last); empty if the first is not less."""
        return max(first, self.span.start), min(last, self.span.start + self.span.num_tokens)


@dataclass(slots=True)
class Scene:
    """What a row's prompt shows. `pictures` are given up as soon as the prompt is computed."""

    num_tokens: int
    pictures: list[Picture]
    positions: np.ndarray | None  # [3, num_tokens]
    shift: int = 0  # of the tokens behind them

    def positions_of(self, part: RowStep) -> np.ndarray:
        """[3, count] of the tokens that a row computes in a step."""
        first, last = part.start, part.start + part.count
        if self.positions is None or part.decode:
            return np.broadcast_to(np.arange(first, last) + self.shift, (3, part.count))
        return self.positions[:, first:last]


@dataclass(frozen=True, slots=True)
class Encoded:
    shape: Size
    embeddings: torch.Tensor


class Store:
    """Encoded pictures by their content; those that nobody asked for in the longest time make room."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._kept: OrderedDict[bytes, Encoded] = OrderedDict()

    def get(self, digest: bytes) -> Encoded | None:
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return self._kept.get(digest)

    def put(self, digest: bytes, encoded: Encoded) -> None:
        self._kept[digest] = encoded
        self._num_tokens += len(encoded.embeddings)
        while self._num_tokens > self._max_tokens:
            _, oldest = self._kept.popitem(last=False)
            self._num_tokens -= len(oldest.embeddings)


class Eyes:
    """Belongs to an engine and sees what that does: rows that are admitted, and steps."""

    def __init__(self, model: SeeingModel, rules: ImageRules, max_rows: int, device: torch.device) -> None:
        self.num_seen = 0  # pictures that were encoded
        self._model = model
        self._rules = rules
        self._device = device
        self._scenes: dict[int, Scene] = {}
        self._store = Store(STORED_TOKENS)
        # The row beyond the last is the one that captured decodes are filled up with.
        self._shifts = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        model.position_shifts = self._shifts

    @torch.inference_mode()
    def rehearse(self, max_tokens: int) -> None:
        """Look at the largest picture that a prompt of so many tokens may have, so that its memory is measured."""
        shape = self._rules.largest(max_tokens)
        self._model.see(torch.zeros(num_pixels(shape, self._rules), device=self._device), shape)

    def admit(self, admission: pb.Admission) -> None:
        row, num_tokens = admission.row, len(unpack_token_ids(admission.input_ids))
        pictures = [self._picture(image, admission.num_cached) for image in admission.images]
        # One token more than there are: text, which shows how far those behind the pictures have moved.
        positions = self._model.lay_out(num_tokens + 1, [picture.span for picture in pictures]) if pictures else None
        shift = 0 if positions is None else int(positions[0, -1]) - num_tokens
        self._scenes[row] = Scene(num_tokens, pictures, positions, shift)
        self._shifts[row] = shift

    def look(self, step: Step, parts: Sequence[RowStep]) -> Step:
        """The step with what its rows see; `parts` are in its order."""
        scenes = [self._scenes.get(part.row, Scene(0, [], None)) for part in parts]
        places: list[np.ndarray] = []
        embeddings: list[torch.Tensor] = []
        offset = 0  # of the place in the step over that in the sequence
        for scene, part in zip(scenes, parts, strict=True):
            for picture in scene.pictures:
                first, last = picture.part(part.start, part.start + part.count)
                if first < last:
                    assert picture.embeddings is not None, "it was said to be in the cache"
                    places.append(np.arange(first, last) - part.start + offset)
                    embeddings.append(picture.embeddings[first - picture.span.start : last - picture.span.start])
            offset += part.count
        axes = np.concatenate([scene.positions_of(part) for scene, part in zip(scenes, parts, strict=True)], axis=1)
        return replace(
            step,
            seen=Seen(
                to_device(np.concatenate(places), self._device) if places else None,
                torch.cat(embeddings) if embeddings else None,
                to_device(axes, self._device),
            ),
        )

    def forget(self, parts: Sequence[RowStep]) -> None:
        """The step is computed: pictures of finished prompts are needed no more."""
        for part in parts:
            scene = self._scenes.get(part.row)
            if scene is not None and part.start + part.count >= scene.num_tokens:
                scene.pictures = []

    def _picture(self, image: pb.AdmittedImage, num_cached: int) -> Picture:
        digest = hashlib.sha256(image.image.data).digest()
        encoded = self._store.get(digest)
        if encoded is None and image.start + image.num_tokens <= num_cached:
            picture = decode(image.image.data)
            span = ImageSpan(image.start, image.num_tokens, self._rules.shape(Size(picture.height, picture.width)))
            return Picture(span, None)
        if encoded is None:
            encoded = self._encode(image.image.data)
            self._store.put(digest, encoded)
        assert len(encoded.embeddings) == image.num_tokens, "the router counts by the same rules"
        return Picture(ImageSpan(image.start, image.num_tokens, encoded.shape), encoded.embeddings)

    def _encode(self, data: bytes) -> Encoded:
        picture = decode(data)
        shape = self._rules.shape(Size(picture.height, picture.width))
        pixels = to_device(pixels_of(picture, self._rules), self._device)
        self.num_seen += 1
        return Encoded(shape, self._model.see(pixels, shape))
