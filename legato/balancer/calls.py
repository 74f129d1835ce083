"""A client's request, kept by the balancer until the response ends, because it may have to be sent again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from legato.balancer.answers import Headers
from legato.balancer.prefixes import BYTES_PER_TOKEN, chain_of
from legato.balancer.prompts import GENERATING, NO_PROMPT, Prompt, prompt_of
from legato.balancer.upstream import request_head
from legato.ipc.routed import HEAD_HEADER, HEADER_PREFIX, KEY_HEADER, RouteHead, add_marks, encode_sent

# Between two programs, not between the first and the last (RFC 9110, 7.6.1), and what we say ourselves.
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection"}
)
_NOT_SENT = HOP_BY_HOP | {b"content-length", b"expect"}
_NOT_RETURNED = HOP_BY_HOP | {b"date"}
_WITH_KEY = (b"authorization", b"x-api-key")
_prefix, _key_header, _head_header = HEADER_PREFIX.encode(), KEY_HEADER.encode(), HEAD_HEADER.encode()
# In place of a key; keys have no spaces.
SEVERAL_KEYS = b"several keys"

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class ClientCall:
    method: str
    path: str
    target: bytes
    headers: Headers
    body: bytes
    # What it shows as its API key, however it is written; empty if it shows none.
    key: bytes
    prompt: Prompt
    chain: list[int]
    # Estimated: of the prompt.
    num_tokens: int
    # ... and of it, those that the replica which was chosen last has to compute.
    num_new_tokens: int
    # What ids and seeds are drawn from, on every replica the same.
    number: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))
    # Of what the client has got, and of which model that is.
    marks: list[bytes] = field(default_factory=list)
    model: tuple[str, str | None] | None = None

    @classmethod
    def of(cls, method: str, path: str, target: bytes, headers: Headers, client: str, body: bytes) -> ClientCall:
        sent, keys = [], []
        for header in headers:
            name, value = header
            if name in _NOT_SENT or name.startswith(_prefix):
                continue
            sent.append(header)
            if name in _WITH_KEY and (words := value.split()):  # a scheme, which servers let clients write as they like
                keys.append(words[-1])
        if client:
            sent.append((b"x-forwarded-for", client.encode()))
        prompt = prompt_of(body) if method == "POST" and path in GENERATING else NO_PROMPT
        chain = chain_of(b"\n".join([*keys, prompt.model]), prompt.text)
        num_tokens = len(prompt.text) // BYTES_PER_TOKEN
        return cls(method, path, target, sent, body, _one_key(keys), prompt, chain, num_tokens, num_tokens)

    @property
    def generates(self) -> bool:
        return self.prompt is not NO_PROMPT

    def encode(self, route_key: str | None) -> tuple[bytes, bytes]:
        """Head and body for a replica, with the tokens that the client has got in front."""
        headers, body = self.parts(route_key)
        return request_head(self.method, self.target, headers, len(body)), body

    def parts(self, route_key: str | None) -> tuple[Headers, bytes]:
        """The same, the headers not encoded yet."""
        headers, sent = list(self.headers), b""
        if route_key is not None:
            sent = encode_sent(add_marks(self.marks)) if self.marks else b""
            route = RouteHead(id=self.number, created=self.created, resume=len(sent))
            headers += [(_key_header, route_key.encode()), (_head_header, _encode(route))]
        return headers, sent + self.body


def returned(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers of an answer as the client sees them. The server of the balancer writes the date."""
    return [(name, value) for name, value in headers if name not in _NOT_RETURNED and not name.startswith(_prefix)]


def _one_key(keys: list[bytes]) -> bytes:
    """With several of them nobody knows which the replica accepts: those who do that are one client."""
    if not keys:
        return b""
    return keys[0] if keys.count(keys[0]) == len(keys) else SEVERAL_KEYS
