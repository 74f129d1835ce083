"""Images of admitted requests become embeddings at the positions of their tokens.

An image is decoded and encoded once, when its request gets a row. Its embeddings stay with the row until the prompt is
computed, and for a while in a cache, so that an image of a preempted request, or of the next turn of a conversation, is
not encoded again. Nor is an image whose tokens are all in the prefix cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from legato.layers.kv_cache import KVCache
from legato.layers.step import ImageEmbeddings, MutualTokens, Step
from legato.models.vision import ImageSpan, MutualModel, VisionModel, WithImageTokens
from legato.pb import generate_pb2 as pb
from legato.pb import unpack_token_ids
from legato.server.rows import Rows, RowStep, to_device
from legato.server.vision.pixels import num_pixels, tower_pixels
from legato.server.vision.preparing import ImagePreparation, PreparedImage
from legato.server.vision.tower_graphs import TowerGraphs
from legato.vision.files import decode
from legato.vision.rules import ImageRules, Size

# Image tokens whose embeddings are kept for requests to come: 64 MiB for a 7B model in 16 bits.
STORED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class ImageInPrompt:
    """One image of a prompt, as the language model reads it."""

    span: ImageSpan
    embeddings: torch.Tensor | None  # [num_tokens, hidden_size]; None: all of it is in the prefix cache

    def part(self, first: int, last: int) -> tuple[int, int]:
        """The image's positions within [first, last) of the sequence; empty if the first is not less."""
        return max(first, self.span.start), min(last, self.span.start + self.span.num_tokens)


@dataclass(slots=True)
class RowImages:
    """The images of a row's prompt. They are dropped as soon as the prompt is computed."""

    num_tokens: int
    images: list[ImageInPrompt]
    positions: np.ndarray | None  # [3, num_tokens]
    shift: int = 0  # of the tokens that follow them
    groups: Sequence[tuple[int, int]] = ()  # positions [begin, end) of tokens that see each other

    def mutual(self, part: RowStep, offset: int) -> list[MutualTokens]:
        """Those of a step's part whose tokens begin at `offset` in the step."""
        last = part.start + part.count
        found: list[MutualTokens] = []
        for begin, end in self.groups:
            if begin < last and part.start < end:
                assert end <= last, "tokens that see each other are computed in one step"
                first = max(begin, part.start)
                place = offset + first - part.start
                found.append(MutualTokens(place, end - first, first, begin, end, part.row))
        return found

    def positions_of(self, part: RowStep) -> np.ndarray:
        """[3, count] of the tokens that a row computes in a step."""
        first, last = part.start, part.start + part.count
        if self.positions is None or first >= self.num_tokens:  # a decode, perhaps with drafts
            return np.broadcast_to(np.arange(first, last) + self.shift, (3, part.count))
        return self.positions[:, first:last]


@dataclass(frozen=True, slots=True)
class EncodedImage:
    shape: Size
    embeddings: torch.Tensor


class EncodedImageCache:
    """Embeddings by the content of their image; the least recently used are evicted first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._kept: OrderedDict[bytes, EncodedImage] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def get(self, digest: bytes) -> EncodedImage | None:
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return self._kept.get(digest)

    def put(self, digest: bytes, encoded: EncodedImage) -> None:
        self._kept[digest] = encoded
        self._num_tokens += len(encoded.embeddings)
        while self._num_tokens > self._max_tokens:
            _, oldest = self._kept.popitem(last=False)
            self._num_tokens -= len(oldest.embeddings)


class VisionEncoder:
    """Belongs to an engine, which tells it of admitted rows and of steps."""

    def __init__(self, model: VisionModel, rules: ImageRules, max_rows: int, device: torch.device) -> None:
        self.num_encoded = 0
        self._model = model
        self._rules = rules
        self._device = device
        self._rows: dict[int, RowImages] = {}
        self._cache = EncodedImageCache(STORED_TOKENS)
        self._preparation = ImagePreparation(rules)
        self.graphs: TowerGraphs | None = None
        # The row beyond the last is the one that captured decodes are filled up with.
        self._shifts = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        model.position_shifts = self._shifts
        if isinstance(model, WithImageTokens):
            model.image_rules = rules

    @torch.inference_mode()
    def encode_largest(self, max_tokens: int) -> None:
        """Encode the largest image that a prompt of so many tokens may have, so that its memory is measured."""
        shape = self._rules.largest(max_tokens)
        self._model.encode_image(torch.zeros(num_pixels(shape, self._rules), device=self._device), shape)

    def expect(self, admissions: Sequence[pb.Admission]) -> Iterable[bytes]:
        """Of a step that will be launched: its images are decoded and resized meanwhile. From any thread. Returns their
        digests."""
        images = [image for admission in admissions for image in admission.images if not is_cached(image, admission)]
        files = {hashlib.sha256(image.image.data).digest(): image.image.data for image in images}
        if files:
            self._preparation.start({digest: data for digest, data in files.items() if digest not in self._cache})
        return files

    def admit_all(self, admissions: Sequence[pb.Admission]) -> None:
        """Of a step: their images are encoded one after the other."""
        expected = self.expect(admissions)
        try:
            for admission in admissions:
                self.admit(admission)
        finally:
            # Left are those that a step before encoded while they were prepared for this one, or behind a failure.
            self._preparation.drop(expected)

    def admit(self, admission: pb.Admission) -> None:
        row, num_tokens = admission.row, len(unpack_token_ids(admission.input_ids))
        images = [self._image(image, is_cached(image, admission)) for image in admission.images]
        # One token more than there are: text, which shows how far those behind the images have moved.
        spans = [image.span for image in images]
        positions = self._model.image_positions(num_tokens + 1, spans) if spans else None
        shift = 0 if positions is None else int(positions[0, -1]) - num_tokens
        groups: Sequence[tuple[int, int]] = ()
        if isinstance(self._model, MutualModel):
            groups = self._model.groups(num_tokens - admission.num_generated, spans)
        self._rows[row] = RowImages(num_tokens, images, positions, shift, groups)
        self._shifts[row] = shift

    def store_images(self, parts: list[RowStep], rows: Rows, cache: KVCache) -> list[RowStep]:
        """For images that are beside the text: those of the step enter the cache. Returns what is left to compute."""
        return parts

    def add_images(self, step: Step, parts: Sequence[RowStep], block_size: int) -> Step:
        """The step with the images of its rows; `parts` are in its order."""
        rows = [self._rows.get(part.row, RowImages(0, [], None)) for part in parts]
        places: list[np.ndarray] = []
        embeddings: list[torch.Tensor] = []
        mutual: list[MutualTokens] = []
        offset = 0  # of a token's index in the step over its position in the sequence
        for row, part in zip(rows, parts, strict=True):
            for image in row.images:
                first, last = image.part(part.start, part.start + part.count)
                if first < last:
                    assert image.embeddings is not None, "it was said to be in the cache"
                    places.append(np.arange(first, last) - part.start + offset)
                    embeddings.append(image.embeddings[first - image.span.start : last - image.span.start])
            mutual += row.mutual(part, offset)
            offset += part.count
        axes = np.concatenate([row.positions_of(part) for row, part in zip(rows, parts, strict=True)], axis=1)
        return replace(
            step,
            images=ImageEmbeddings(
                to_device(np.concatenate(places), self._device) if places else None,
                torch.cat(embeddings) if embeddings else None,
                to_device(axes, self._device),
                tuple(mutual),
            ),
        )

    def keep_whole(self, parts: Sequence[RowStep]) -> list[RowStep]:
        """The parts of a step; those with tokens that see each other are not to be cut."""
        kept = []
        for part in parts:
            row = self._rows.get(part.row)
            has_group = row is not None and bool(row.mutual(part, 0))
            kept.append(replace(part, num_whole=part.count) if has_group else part)
        return kept

    def forget(self, parts: Sequence[RowStep]) -> None:
        """The step is computed: images of finished prompts are no longer needed."""
        for part in parts:
            row = self._rows.get(part.row)
            if row is not None and part.start + part.count >= row.num_tokens:
                row.images = []

    def _image(self, image: pb.AdmittedImage, in_cache: bool) -> ImageInPrompt:
        digest = hashlib.sha256(image.image.data).digest()
        encoded = self._cache.get(digest)
        if encoded is None and in_cache:
            decoded = decode(image.image.data)
            span = ImageSpan(image.start, image.num_tokens, self._rules.shape(Size(decoded.height, decoded.width)))
            return ImageInPrompt(span, None)
        if encoded is None:
            encoded = self._encode(self._preparation.take(digest, image.image.data))
            self._cache.put(digest, encoded)
        assert len(encoded.embeddings) == image.num_tokens, "the router counts by the same rules"
        return ImageInPrompt(ImageSpan(image.start, image.num_tokens, encoded.shape), encoded.embeddings)

    def _encode(self, prepared: PreparedImage) -> EncodedImage:
        self.num_encoded += 1

        def encode(pixels: torch.Tensor) -> torch.Tensor:
            return self._model.encode_image(tower_pixels(pixels, self._rules), prepared.shape)

        if self.graphs is None:
            return EncodedImage(prepared.shape, encode(to_device(prepared.pixels, self._device)))
        key = (prepared.pixels.shape, prepared.shape)
        return EncodedImage(prepared.shape, self.graphs.run(key, prepared.pixels, self._device, encode))


def is_cached(image: pb.AdmittedImage, admission: pb.Admission) -> bool:
    """Whether all of its tokens are in the prefix cache."""
    return image.start + image.num_tokens <= admission.num_cached
