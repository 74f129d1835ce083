"""Images in prompts: fetched, decoded and counted in tokens before a request is scheduled.

Shards get only images that were decoded successfully once.
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
from legato.api.native import SimpleToken
from legato.ipc.settings import RouterSettings
from legato.scheduling.state import PromptSpan
from legato.vision.fetch import Fetcher, FetchRefused
from legato.vision.files import MIMES, InvalidImage, decode, format_of, has_decoder
from legato.vision.rules import ImageRules, Size, UnsupportedImageShape

# TGI's syntax for an image in a prompt.
_MARKDOWN = re.compile(r"!\[\]\(([^)]*)\)")
_IMAGE_URL = re.compile(r"data:image/|https?://", re.IGNORECASE)
_DATA_URI = re.compile(r"data:([^;,]*)(?:;[^;,]*)*?;base64,", re.IGNORECASE)
# Cache keys of images have this bit and so many of a digest below it.
_DIGEST_BITS = 62
_IMAGE_BIT = 1 << _DIGEST_BITS
# Images decoded in parallel: each may take as much memory as the limits allow.
_NUM_THREADS = 2


class ImageRefused(RequestError):
    """An image that cannot be fetched, decoded or used. 422 in every API, like a chat template error."""

    status, error_type = 422, "validation"

    def __init__(self, problem: str) -> None:
        super().__init__(f"Input validation error: {problem}")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The URL of an image, and the request field that contains it."""

    url: str
    field: str


@dataclass(frozen=True, slots=True)
class CheckedImage:
    data: bytes
    mimetype: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt, as it was sent, and where its tokens are."""

    data: bytes
    mimetype: str
    span: PromptSpan

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
    """Fetches, checks and counts the images of requests to a vision model."""

    def __init__(self, rules: ImageRules, settings: RouterSettings, fetcher: Fetcher | None = None) -> None:
        self.rules = rules
        self._max_bytes = settings.max_image_bytes
        self._max_pixels = settings.max_image_pixels
        largest = min(settings.max_image_bytes, settings.max_image_fetch_size)
        self._fetcher = Fetcher(settings.image_url_allow, largest) if fetcher is None else fetcher
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="images")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def in_text(self, text: str) -> tuple[str, list[ImageSource]]:
        """A prompt with the model's placeholders instead of its images, and those images."""
        sources = [ImageSource(url, "inputs") for url in _MARKDOWN.findall(text)]
        return self.rules.written(_MARKDOWN.sub(lambda _: self.rules.marker, text)), sources

    async def read(self, sources: list[ImageSource], max_tokens: int) -> list[CheckedImage]:
        """Fetch and check images one after the other, until they exceed `max_tokens`."""
        images: list[CheckedImage] = []
        num_tokens = 0
        for source in sources:
            loop = asyncio.get_running_loop()
            images.append(await loop.run_in_executor(self._threads, self._read, source))
            num_tokens += images[-1].num_tokens
            if num_tokens > max_tokens:
                raise TooLong(
                    f"the first {len(images)} images have {num_tokens} tokens, and `inputs` must have fewer than"
                    f" {max_tokens}",
                    limit=max_tokens,
                    input_len=num_tokens,
                )
        return images

    def place(self, ids: list[int], images: list[CheckedImage]) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Repeat each placeholder in the prompt once per token of its image."""
        self._check_placeholders(ids, images)
        token_id = self.rules.token_id
        placed, starts = self.rules.placed(ids, [image.num_tokens for image in images])
        found = [
            PromptImage(image.data, image.mimetype, PromptSpan(start, image.num_tokens, token_id))
            for image, start in zip(images, starts, strict=True)
        ]
        return placed, tuple(found)

    def repeated(self, tokens: list[SimpleToken], images: list[CheckedImage]) -> list[SimpleToken]:
        """The tokens of a text, each placeholder repeated once per token of its image. Images that are not in the text
        leave one."""
        self._check_placeholders([token.id for token in tokens], images)
        if not self.rules.is_in_text:
            return tokens
        counts = iter([image.num_tokens for image in images])
        token_id = self.rules.token_id
        return [each for token in tokens for each in [token] * (next(counts) if token.id == token_id else 1)]

    def _check_placeholders(self, ids: list[int], images: list[CheckedImage]) -> None:
        if (num_placeholders := ids.count(self.rules.token_id)) != len(images):
            raise ImageRefused(
                f"the request has {len(images)} images, but the prompt has {num_placeholders} image placeholders: the"
                " chat template omits images, or the text contains the placeholder token"
            )

    def _read(self, source: ImageSource) -> CheckedImage:
        """Runs in a thread. Errors name the request field of the image."""
        if not has_decoder():
            raise ImageRefused("image support is not installed on this server (pip install 'legato[vision]')")
        try:
            data, declared = self._bytes_of(source.url)
            mimetype = MIMES[format_of(data)]
            # Other types say nothing about the format, as in TGI.
            if declared in MIMES.values() and declared != mimetype:
                raise InvalidImage(f"is {mimetype}, but its data: URI declares another type")
            image = decode(data, self._max_pixels)
            return CheckedImage(data, mimetype, self.rules.num_tokens(Size(image.height, image.width)))
        except (InvalidImage, FetchRefused) as error:
            raise ImageRefused(f"the image of `{source.field}` {error}") from None
        except UnsupportedImageShape as error:
            raise ImageRefused(f"the image of `{source.field}` is not supported: {error}") from None

    def _bytes_of(self, url: str) -> tuple[bytes, str]:
        """The image file and its declared type, which is ignored for fetched files."""
        scheme = url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            return self._fetcher.fetch(url), ""
        if scheme != "data":
            raise InvalidImage("is neither a data: URI nor an http(s) URL")
        head = _DATA_URI.match(url[:256])
        if head is None:
            raise InvalidImage("must be a data: URI of the form data:image/png;base64,…")
        try:
            data = base64.b64decode(url[head.end() :].encode(), validate=True)
        except (binascii.Error, ValueError):
            raise InvalidImage("has invalid base64 data") from None
        if len(data) > self._max_bytes:
            raise InvalidImage(f"has {len(data)} bytes, more than the limit of {self._max_bytes}")
        return data, head.group(1).strip().lower()


def refuse_images(text: str) -> None:
    """For models that take text only: TGI's form of an image is not a sentence to continue."""
    found = _MARKDOWN.search(text)
    if found is not None and _IMAGE_URL.match(found[1]):
        raise ImageRefused("this model takes text only, and `inputs` has an image")


# ---- chats -----------------------------------------------------------------------------------------------------------


def in_messages(messages: list[dict[str, Any]], has_vision: bool) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Messages with images replaced by `{"type": "image"}`, as chat templates expect, and those images in order."""
    sources: list[ImageSource] = []
    bare: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            place = f"messages[{number}].content"
            parts = [_bare(part, f"{place}[{at}]", sources, has_vision) for at, part in enumerate(content)]
            message = {**message, "content": parts}
        bare.append(message)
    return bare, sources


def _bare(part: Any, place: str, sources: list[ImageSource], has_vision: bool) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        if has_vision and isinstance(part, dict) and part.get("type") in ("image", "input_image", "video", "file"):
            raise ImageRefused(f"`{place}.type` is {part['type']!r}: use type 'image_url' for images")
        return part
    if not has_vision:
        raise ImageRefused(f"this model accepts text only, but `{place}` is an image")
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise ImageRefused(f"`{place}.image_url.url` must be a string")
    sources.append(ImageSource(url, f"{place}.image_url.url"))
    return {"type": "image"}
