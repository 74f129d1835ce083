"""Pictures in prompts: where they come from, whether they can be read, and how many tokens they are.

All of that is known before a request is scheduled; a shard gets only pictures that were read once already.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from legato.api.errors import RequestError, TooLong
from legato.ipc.settings import RouterSettings
from legato.scheduling.state import ImageSpan
from legato.vision.fetch import Fetcher, FetchRefused
from legato.vision.files import MIMES, BadPicture, decode, format_of, has_decoder
from legato.vision.rules import ImageRules, Size, UnfitImage, spread_marks

# TGI's way to put a picture into a text.
_MARKDOWN = re.compile(r"!\[\]\(([^)]*)\)")
_IMAGE_URL = re.compile(r"data:image/|https?://", re.IGNORECASE)
_DATA_URI = re.compile(r"data:([^;,]*)(?:;[^;,]*)*?;base64,", re.IGNORECASE)
# Cache keys of images have this bit and so many of a digest below it.
_DIGEST_BITS = 62
_IMAGE_BIT = 1 << _DIGEST_BITS
# Pictures that are read at the same time: each may take as much memory as the limits allow.
_READERS = 2


class ImageRefused(RequestError):
    """A picture that cannot be had, read or shown. 422 in every API, as a template that takes no pictures has it."""

    status, error_type = 422, "validation"

    def __init__(self, problem: str) -> None:
        super().__init__(f"Input validation error: {problem}")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a picture is, and what the client calls that place."""

    url: str
    field: str


@dataclass(frozen=True, slots=True)
class ReadImage:
    data: bytes
    mimetype: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt, as it was sent, and where its tokens are."""

    data: bytes
    mimetype: str
    span: ImageSpan

    def cache_keys(self) -> list[int]:
        """What stands for its tokens in the prefix cache, which compares tokens: numbers beyond any vocabulary, made
        of a digest of the image."""
        digest = int.from_bytes(hashlib.sha256(self.data).digest())
        pieces = [_IMAGE_BIT | digest >> (shift * _DIGEST_BITS) & (_IMAGE_BIT - 1) for shift in range(4)]
        return [pieces[place % 4] for place in range(self.span.num_tokens)]


def with_cache_keys(input_ids: list[int], images: tuple[PromptImage, ...]) -> list[int]:
    """The tokens of a prompt, those of its images as the prefix cache knows them."""
    keyed = list(input_ids) if images else input_ids
    for image in images:
        keyed[image.span.start : image.span.start + image.span.num_tokens] = image.cache_keys()
    return keyed


class Images:
    """What the router does with pictures for a model that sees."""

    def __init__(self, rules: ImageRules, settings: RouterSettings, fetcher: Fetcher | None = None) -> None:
        self.rules = rules
        self._max_bytes = settings.max_image_bytes
        self._max_pixels = settings.max_image_pixels
        largest = min(settings.max_image_bytes, settings.max_image_fetch_size)
        self._fetcher = Fetcher(settings.image_url_allow, largest) if fetcher is None else fetcher
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="images")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def in_text(self, text: str) -> tuple[str, list[Source]]:
        """A prompt with the model's own marks where its pictures were, and those pictures."""
        sources = [Source(url, "inputs") for url in _MARKDOWN.findall(text)]
        return _MARKDOWN.sub(lambda _: self.rules.marker, text), sources

    async def read(self, sources: list[Source], max_tokens: int) -> list[ReadImage]:
        """One after the other, until they are more than fit."""
        images: list[ReadImage] = []
        num_tokens = 0
        for source in sources:
            loop = asyncio.get_running_loop()
            images.append(await loop.run_in_executor(self._threads, self._read, source))
            num_tokens += images[-1].num_tokens
            if num_tokens > max_tokens:
                raise TooLong(
                    f"the first {len(images)} images come to {num_tokens} tokens, and `inputs` must have less than"
                    f" {max_tokens}",
                    limit=max_tokens,
                    input_len=num_tokens,
                )
        return images

    def place(self, ids: list[int], images: list[ReadImage]) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Each mark in the prompt becomes as many as its picture has tokens."""
        token_id = self.rules.token_id
        if (marks := ids.count(token_id)) != len(images):
            raise ImageRefused(
                f"the prompt has {len(images)} images and {marks} places for them: the chat template leaves some out,"
                " or the text itself has the token that stands for an image"
            )
        placed, starts = spread_marks(ids, token_id, [image.num_tokens for image in images])
        found = [
            PromptImage(image.data, image.mimetype, ImageSpan(start, image.num_tokens, token_id))
            for image, start in zip(images, starts, strict=True)
        ]
        return placed, tuple(found)

    def _read(self, source: Source) -> ReadImage:
        """In a thread: whatever is wrong with the picture is told in terms of its field."""
        if not has_decoder():
            raise ImageRefused("this server cannot read images: it lacks Pillow (pip install 'legato[vision]')")
        try:
            data, claimed = self._bytes_of(source.url)
            mimetype = MIMES[format_of(data)]
            if claimed not in ("", "image/jpg", "image/*", mimetype):
                raise BadPicture(f"is {mimetype}, but is said to be something else")
            picture = decode(data, self._max_pixels)
            return ReadImage(data, mimetype, self.rules.num_tokens(Size(picture.height, picture.width)))
        except (BadPicture, FetchRefused) as error:
            raise ImageRefused(f"the image of `{source.field}` {error}") from None
        except UnfitImage as error:
            raise ImageRefused(f"the image of `{source.field}` cannot be shown: {error}") from None

    def _bytes_of(self, url: str) -> tuple[bytes, str]:
        """And the type that comes with them; that of a fetched file says less than its bytes do."""
        scheme = url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            return self._fetcher.fetch(url), ""
        if scheme != "data":
            raise BadPicture("is neither a data: URI nor an http(s) URL")
        head = _DATA_URI.match(url[:256])
        if head is None:
            raise BadPicture("must be a data: URI of the form data:image/png;base64,…")
        try:
            data = base64.b64decode(url[head.end() :].encode(), validate=True)
        except (binascii.Error, ValueError):
            raise BadPicture("has a base64 encoding that is invalid") from None
        if len(data) > self._max_bytes:
            raise BadPicture(f"has {len(data)} bytes, more than the limit of {self._max_bytes}")
        return data, head.group(1).strip().lower()


def refuse_images(text: str) -> None:
    """For models that take text only: TGI's form of an image is not a sentence to continue."""
    found = _MARKDOWN.search(text)
    if found is not None and _IMAGE_URL.match(found[1]):
        raise ImageRefused("this model takes text only, and `inputs` has an image")


# ---- chats -----------------------------------------------------------------------------------------------------------


def in_messages(messages: list[dict[str, Any]], sees: bool) -> tuple[list[dict[str, Any]], list[Source]]:
    """Messages whose pictures are bare marks, as templates want them, and those pictures in their order."""
    sources: list[Source] = []
    bare: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            place = f"messages[{number}].content"
            parts = [_bare(part, f"{place}[{at}]", sources, sees) for at, part in enumerate(content)]
            message = {**message, "content": parts}
        bare.append(message)
    return bare, sources


def _bare(part: Any, place: str, sources: list[Source], sees: bool) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        if sees and isinstance(part, dict) and part.get("type") in ("image", "input_image", "video", "file"):
            raise ImageRefused(f"`{place}.type` is {part['type']!r}: images are of type 'image_url'")
        return part
    if not sees:
        raise ImageRefused(f"this model takes text only, and `{place}` is an image")
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise ImageRefused(f"`{place}.image_url.url` must be a string")
    sources.append(Source(url, f"{place}.image_url.url"))
    return {"type": "image"}
