"""Requests that come through a balancer which knows our key (`ipc/routed.py`): what they bring, and the marks that
their streams have."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Sequence

import msgspec
from starlette.types import Scope

from legato.api.errors import InvalidRequest, MalformedBody, RequestError, ServerLost
from legato.common.identity import RequestIdentity
from legato.common.throttled_log import ThrottledLog
from legato.ipc.routed import (
    FAILED,
    HEAD_HEADER,
    KEY_HEADER,
    LAST,
    MORE,
    RouteHead,
    SentTokens,
    decode_sent,
    mark,
)

# Bytes of tokens that were sent already: more than any model's longest answer.
MAX_RESUME = 8 << 20

_head_decoder = msgspec.json.Decoder(RouteHead)
_key_header, _head_header = KEY_HEADER.encode(), HEAD_HEADER.encode()
logger = logging.getLogger(__name__)


class RoutedRequest:
    def __init__(self, head: RouteHead | None = None) -> None:
        """Without a head it is a question of the balancer's own."""
        self._head = head
        # What the client has got from another server, one for each choice; known when the body was read.
        self.sent: list[SentTokens] = []

    @property
    def resume_len(self) -> int:
        """Bytes in front of the body."""
        return 0 if self._head is None else self._head.resume

    def enter(self) -> None:
        """From here on the current task draws the ids and seeds that any other server draws for the request."""
        if self._head is not None:
            RequestIdentity(self._head.id, self._head.created).enter()

    def take_sent(self, body: bytes) -> bytes:
        """Reads what stands in front of the body, and returns the body."""
        size = self.resume_len
        if size:
            try:
                self.sent = decode_sent(body[:size])
            except msgspec.DecodeError as error:
                raise MalformedBody(f"the tokens in front of it: {error}") from None
        return body[size:]

    def check_sent(self, limits: Sequence[int], vocab_size: int) -> None:
        """`limits` are the tokens that each choice may have."""
        if self.sent and len(self.sent) > len(limits):
            raise InvalidRequest(f"{len(self.sent)} choices were sent, of {len(limits)}")
        self.sent += [SentTokens() for _ in range(len(limits) - len(self.sent))]
        for sent, limit in zip(self.sent, limits, strict=True):
            if len(sent.token_ids) >= limit + bool(sent.finish_reason):
                raise InvalidRequest(f"{len(sent.token_ids)} tokens were sent, of at most {limit}")
            if sum(sent.sizes) != len(sent.token_ids) or any(size < 0 for size in sent.sizes):
                raise InvalidRequest("the sizes of writes must add up to the number of tokens")
            if not all(0 <= token_id < vocab_size for token_id in sent.token_ids):
                raise InvalidRequest(f"tokens that were sent must be >= 0 and < {vocab_size}")

    @staticmethod
    def mark(news: Iterable[tuple[int, list[int], str | None]], *, ended: bool) -> bytes:
        return mark(LAST if ended else MORE, news)

    @staticmethod
    def failure_mark(error: RequestError) -> bytes:
        """Other servers fail for the same reason, unless this one is lost."""
        return mark(FAILED if isinstance(error, ServerLost) else LAST)


class RouteKey:
    """Tells the balancer's requests from others."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._log = ThrottledLog(logger)

    def read(self, scope: Scope) -> RoutedRequest | None:
        key, head = None, None
        for name, value in scope["headers"]:
            if name == _key_header:
                key = value
            elif name == _head_header:
                head = value
        if key is None or not hmac.compare_digest(key, self._key):
            return None
        try:
            found = None if head is None else _head_decoder.decode(head)
        except msgspec.DecodeError:
            self._log.warning(f"A balancer sent an invalid {HEAD_HEADER} header, which is ignored")
            return None
        if found is not None and not 0 <= found.resume <= MAX_RESUME:
            self._log.warning(f"A balancer sent more than {MAX_RESUME} bytes of tokens, which is ignored")
            return None
        return RoutedRequest(found)
