"""From the texts of a request to token ids: prompts, pairs, truncation, and every limit on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, TypeAlias, TypedDict, Unpack

from msgspec import Struct
from tokenizers import Encoding, Tokenizer

from legato.api.errors import InvalidRequest, TooLong
from legato.http.routes.embeddings.errors import EmptyBatch
from legato.http.validation import Validator
from legato.ipc.settings import EmbeddingSettings

Side: TypeAlias = Literal["left", "right"]
# A text, a pair of texts, or token ids.
RawText: TypeAlias = str | tuple[str, str] | list[int]

# Characters that are tokenized in less time than it takes to reach a thread and come back.
_SHORT = 512


class TokenizedText(Struct, frozen=True):
    """`second_start` is where the second text of a pair begins, if the tokenizer tells them apart."""

    input_ids: list[int]
    second_start: int = 0


class ReadOptions(TypedDict, total=False):
    """The text that stands before all texts, and whether and at which end those that are too long are cut."""

    prompt: str
    truncate: bool
    side: Side


class TextReader:
    def __init__(self, tokenizer: Tokenizer, validator: Validator, settings: EmbeddingSettings) -> None:
        self._tokenizer = tokenizer
        self._validator = validator
        self._settings = settings
        self._max_tokens = validator.limits.max_input_tokens
        self._cutting = cache(self._make_cutting)

    def listed(self, given: str | list[str | int | list[int]], name: str) -> list[RawText]:
        """What `input` or `inputs` means: a text, its token ids, or a list of those, all of one kind."""
        if isinstance(given, str):
            return [given]
        if not given:
            raise EmptyBatch(f"`{name}` cannot be empty", name)
        ids = [item for item in given if isinstance(item, int)]
        if len(ids) == len(given):
            return [ids]
        texts: list[RawText] = [item for item in given if not isinstance(item, int)]
        if ids or len({type(item) for item in texts}) > 1:
            raise InvalidRequest(f"`{name}` must hold texts, token ids or lists of token ids, not a mixture", name)
        self.check_count(len(texts))
        return texts

    def check_count(self, count: int) -> None:
        maximum = self._settings.max_client_batch_size
        if count > maximum:
            raise InvalidRequest(f"batch size {count} > maximum allowed batch size {maximum} (--max-client-batch-size)")

    def prompt(self, name: str | None) -> str:
        """The text that stands before all texts of a request."""
        prompts, chosen = self._settings.prompts, self._settings.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise InvalidRequest(f"`prompt_name` must be a prompt of the model: {known}", "prompt_name")
        return prompts[chosen]

    async def read(self, texts: Sequence[RawText], name: str, **how: Unpack[ReadOptions]) -> list[TokenizedText]:
        """`name` is what the client calls the texts."""
        prompt, truncate, side = how.get("prompt", ""), how.get("truncate", False), how.get("side", "right")
        for text in texts:
            if not text or (isinstance(text, tuple) and not all(text)):
                raise InvalidRequest(f"`{name}` cannot be empty", name)
        if isinstance(texts[0], list):
            ids = [text for text in texts if isinstance(text, list)]
            return [self._from_ids(each, name, truncate, side) for each in ids]
        words = [_with_prompt(text, prompt) for text in texts if not isinstance(text, list)]
        size = num_characters(words)
        if size <= _SHORT and not truncate:
            encodings = self._encode(words, truncate, side)
        else:
            encodings = await self._validator.in_thread(lambda: self._encode(words, truncate, side), size)
        return [self._checked(encoding, name) for encoding in encodings]

    def _encode(self, texts: list[str | tuple[str, str]], truncate: bool, side: Side) -> list[Encoding]:
        tokenizer = self._cutting(side) if truncate else self._tokenizer
        try:
            encodings: list[Encoding] = tokenizer.encode_batch_fast(texts)
        except BaseException as error:  # a panic inside the tokenizer is not an Exception
            raise InvalidRequest(f"tokenizer error {error}") from error
        return encodings

    def _make_cutting(self, side: Side) -> Tokenizer:
        """Another tokenizer, because what it cuts at is part of its state. Special tokens stay."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.enable_truncation(self._max_tokens, direction=side)
        return tokenizer

    def _checked(self, encoding: Encoding, name: str) -> TokenizedText:
        ids: list[int] = encoding.ids
        if not ids:
            raise InvalidRequest(f"`{name}` cannot be empty", name)
        self._check_length(ids, name)
        self._validator.check_token_ids(name, (max(ids),))
        types: list[int] = encoding.type_ids
        return TokenizedText(ids, types.index(1) if types[-1] == 1 else 0)

    def _from_ids(self, ids: list[int], name: str, truncate: bool, side: Side) -> TokenizedText:
        if truncate:
            ids = ids[: self._max_tokens] if side == "right" else ids[-self._max_tokens :]
        self._check_length(ids, name)
        self._validator.check_token_ids(name, (min(ids), max(ids)))
        return TokenizedText(ids)

    def _check_length(self, ids: list[int], name: str) -> None:
        if len(ids) > self._max_tokens:
            raise TooLong(
                f"`{name}` must have less than {self._max_tokens} tokens. Given: {len(ids)}",
                limit=self._max_tokens,
                input_len=len(ids),
            )


def _with_prompt(text: str | tuple[str, str], prompt: str) -> str | tuple[str, str]:
    return prompt + text if isinstance(text, str) and prompt else text


def num_characters(texts: Sequence[RawText]) -> int:
    """Of token ids, their number."""
    return sum(sum(map(len, text)) if isinstance(text, tuple) else len(text) for text in texts)
