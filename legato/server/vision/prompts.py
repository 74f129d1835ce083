"""Prompts with pictures, of callers without a router: they are read, counted and given the places of their tokens here.

Our own router has done all that before a shard hears of a picture; TGI's unary calls bring chunks of text and pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer

from legato.pb import generate_pb2 as pb
from legato.server.interceptor import RequestRefused
from legato.vision.files import InvalidImage, decode, has_decoder
from legato.vision.rules import ImageRules, Size, UnsupportedImageShape, expand_placeholders

# Of one picture, as a router allows that was not told otherwise (--max-image-pixels).
MAX_PIXELS = 1 << 24


@dataclass(frozen=True, slots=True)
class Prompt:
    input_ids: list[int]
    images: list[pb.AdmittedImage] = field(default_factory=list)


class Prompts:
    """`rules` are None for a model that does not see."""

    def __init__(self, tokenizer: Tokenizer, rules: ImageRules | None) -> None:
        self._tokenizer = tokenizer
        self._rules = rules

    def read(self, request: pb.Request) -> Prompt:
        """Chunks say more than `inputs`, which repeats them in one string, but only where one of them is a picture."""
        chunks = request.input_chunks.chunks
        pictures = [chunk.image for chunk in chunks if chunk.HasField("image")]
        if pictures and self._rules is None:
            raise RequestRefused(f"request {request.id}: this model takes text only, and `input_chunks` has an image")
        marker = "" if self._rules is None else self._rules.marker
        ids = list(request.input_ids)
        if not ids:
            spelled = "".join(marker if chunk.HasField("image") else chunk.text for chunk in chunks)
            text = spelled if pictures else request.inputs or spelled
            ids = self._tokenizer.encode(text, add_special_tokens=request.add_special_tokens).ids
        prompt = Prompt(ids) if self._rules is None else _placed(request, ids, pictures, self._rules)
        if not request.truncate or len(prompt.input_ids) <= request.truncate:
            return prompt
        if pictures:
            raise RequestRefused(
                f"request {request.id}: `truncate` cannot cut {len(prompt.input_ids)} tokens to {request.truncate},"
                " because some of them are an image"
            )
        return Prompt(prompt.input_ids[-request.truncate :])


def _placed(request: pb.Request, ids: list[int], pictures: list[pb.Image], rules: ImageRules) -> Prompt:
    """Each mark becomes as many as its picture has tokens."""
    if (marks := ids.count(rules.token_id)) != len(pictures):
        raise RequestRefused(
            f"request {request.id}: the prompt has {len(pictures)} images and {marks} places for them: the text itself"
            " has the token that stands for an image, or `input_ids` has not one for each"
        )
    counts = [_num_tokens(request, number, picture, rules) for number, picture in enumerate(pictures)]
    placed, starts = expand_placeholders(ids, rules.token_id, counts)
    images = [
        pb.AdmittedImage(image=picture, start=start, num_tokens=count)
        for picture, start, count in zip(pictures, starts, counts, strict=True)
    ]
    return Prompt(placed, images)


def _num_tokens(request: pb.Request, number: int, picture: pb.Image, rules: ImageRules) -> int:
    """Read once before it is admitted: later a picture that cannot be read would cost others their step."""
    if not has_decoder():
        raise RequestRefused("this server cannot read images: it lacks Pillow (pip install 'legato[vision]')")
    try:
        seen = decode(picture.data, MAX_PIXELS)
        return rules.num_tokens(Size(seen.height, seen.width))
    except InvalidImage as error:
        problem = str(error)
    except UnsupportedImageShape as error:
        problem = f"is not supported: {error}"
    raise RequestRefused(f"request {request.id}: image {number} of `input_chunks` {problem}")
