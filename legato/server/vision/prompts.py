"""Prompts with images, of callers without a router: images are decoded and their tokens placed here.

Legato's router has done that before a shard gets an image; TGI's unary calls bring chunks of text and images.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer

from legato.pb import generate_pb2 as pb
from legato.server.interceptor import RequestRefused
from legato.text.galactica import SequenceSplitter
from legato.vision.files import InvalidImage, decode, has_decoder
from legato.vision.rules import ImageRules, Size, UnsupportedImageShape

# Of one image: the default of --max-image-pixels.
MAX_PIXELS = 1 << 24


@dataclass(frozen=True, slots=True)
class UnaryPrompt:
    input_ids: list[int]
    images: list[pb.AdmittedImage] = field(default_factory=list)


class PromptReader:
    """`rules` are None for a model without vision."""

    def __init__(self, tokenizer: Tokenizer, rules: ImageRules | None) -> None:
        self._tokenizer = tokenizer
        self._splitter = SequenceSplitter(tokenizer)
        self._rules = rules

    def read(self, request: pb.Request) -> UnaryPrompt:
        """`inputs` repeats the chunks in one string: they are read only where one of them is an image."""
        chunks = request.input_chunks.chunks
        images = [chunk.image for chunk in chunks if chunk.HasField("image")]
        if images and self._rules is None:
            raise RequestRefused(f"request {request.id}: this model takes text only, and `input_chunks` has an image")
        marker = "" if self._rules is None else self._rules.marker
        ids = list(request.input_ids)
        if not ids:
            spelled = "".join(marker if chunk.HasField("image") else chunk.text for chunk in chunks)
            text = spelled if images else request.inputs or spelled
            special = request.add_special_tokens
            if self._rules is not None:
                text, special = self._rules.written(text), special and self._rules.adds_special_tokens
            ids = self._tokenizer.encode(self._splitter.marked(text), add_special_tokens=special).ids
        prompt = UnaryPrompt(ids) if self._rules is None else _placed(request, ids, images, self._rules)
        if not request.truncate or len(prompt.input_ids) <= request.truncate:
            return prompt
        if images:
            raise RequestRefused(
                f"request {request.id}: `truncate` cannot cut {len(prompt.input_ids)} tokens to {request.truncate},"
                " because some of them are an image"
            )
        return UnaryPrompt(prompt.input_ids[-request.truncate :])


def _placed(request: pb.Request, ids: list[int], images: list[pb.Image], rules: ImageRules) -> UnaryPrompt:
    """Each image token is repeated as often as its image has tokens."""
    if (marks := ids.count(rules.token_id)) != len(images):
        raise RequestRefused(
            f"request {request.id}: the prompt has {len(images)} images and {marks} image tokens: the text itself has"
            " the token that stands for an image, or `input_ids` does not have one for each"
        )
    counts = [_num_tokens(request, number, image, rules) for number, image in enumerate(images)]
    placed, starts = rules.placed(ids, counts)
    admitted = [
        pb.AdmittedImage(image=image, start=start, num_tokens=count)
        for image, start, count in zip(images, starts, counts, strict=True)
    ]
    return UnaryPrompt(placed, admitted)


def _num_tokens(request: pb.Request, number: int, image: pb.Image, rules: ImageRules) -> int:
    """Decoded once before it is admitted: an image that cannot be read would fail a whole step."""
    if not has_decoder():
        raise RequestRefused("this server cannot read images: it lacks Pillow (pip install 'legato[vision]')")
    try:
        decoded = decode(image.data, MAX_PIXELS)
        return rules.num_tokens(Size(decoded.height, decoded.width))
    except InvalidImage as error:
        problem = str(error)
    except UnsupportedImageShape as error:
        problem = f"is not supported: {error}"
    raise RequestRefused(f"request {request.id}: image {number} of `input_chunks` {problem}")
