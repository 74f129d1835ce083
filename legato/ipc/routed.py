"""What a balancer (`legato route`) and the servers behind it say to each other beside what clients say.

With every request the balancer sends the key that both were given (`--route-key`) and a `RouteHead`: the number that
ids and seeds are drawn from. A server that knows the key begins every write of a stream with a line for the balancer,
which removes it: a mark.

    :+0=12,13            more follows; choice 0 has got the tokens 12 and 13 since the last mark
    :.0=7/eos_token      that was all; choice 0 ended
    :!                   this server cannot go on: what follows is the error, for the case that no other can

A write and its mark are one chunk of HTTP: the balancer passes on whole chunks only. So it knows which tokens its
client has seen, and another server can go on after them: the body begins with them then, `RouteHead.resume` bytes long.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

KEY_HEADER = "x-legato-route-key"
HEAD_HEADER = "x-legato-route"
# Headers of ours begin with this, in both directions; clients neither send nor see them.
HEADER_PREFIX = "x-legato-route"
# What a server says in `HEAD_HEADER`: the stream has marks; the request is lost, but not for other servers.
MARKED, LOST = "marks", "lost"
STATE_PATH = "/replica/state"
EVENTS_PATH = "/replica/events"

MORE, LAST, FAILED = b"+", b".", b"!"
# How a mark begins behind which more follows.
MARKS_MORE = b":" + MORE


class RouteHead(Struct, frozen=True):
    # As long as it is secret, nobody can guess what is drawn from it.
    id: str
    # Seconds since 1970.
    created: int
    # Bytes before the body: `SentTokens` of every choice, as MessagePack.
    resume: int = 0


class SentTokens(Struct, array_like=True):
    """What a client has got of one choice, and why that was all, if it was."""

    token_ids: list[int] = []
    finish_reason: str | None = None
    # How many tokens each write had: events may be numbered by writes.
    sizes: list[int] = []


class ReplicaState(Struct, kw_only=True):
    """Response of GET /replica/state."""

    ready: bool
    draining: bool
    model_id: str
    model_sha: str | None
    version: str
    # Another value says that the prefix cache has been emptied.
    epoch: str
    # Requests, and how many may run at once.
    running: int
    queued: int
    max_rows: int
    max_requests: int
    # Of the KV cache; unused cached blocks count as free.
    free_blocks: int
    total_blocks: int
    block_size: int
    # Processes that speak HTTP: a balancer has a connection to each for the streams of all clients.
    http_workers: int = 1
    # Whether the balancer's key is the server's: streams have marks, and can go on here.
    resumes: bool = False


_encode_sent = msgspec.msgpack.Encoder().encode
_sent_decoder = msgspec.msgpack.Decoder(list[SentTokens])


def encode_sent(sent: list[SentTokens]) -> bytes:
    return _encode_sent(sent)


def decode_sent(data: bytes) -> list[SentTokens]:
    """msgspec.DecodeError"""
    return _sent_decoder.decode(data)


def mark(kind: bytes, news: Iterable[tuple[int, list[int], str | None]] = ()) -> bytes:
    """`news` are choices, the tokens they have got, and why they ended if they did."""
    words = []
    for choice, token_ids, reason in news:
        ids = str(token_ids[0]) if len(token_ids) == 1 else ",".join(map(str, token_ids))
        words.append(f"{choice}={ids}" if reason is None else f"{choice}={ids}/{reason}")
    return b":%b%b\n" % (kind, ";".join(words).encode())


def add_marks(marks: Iterable[bytes]) -> list[SentTokens]:
    """What the choices have got by all these marks."""
    found: dict[int, SentTokens] = {}
    for line in marks:
        for word in filter(None, line[2:].decode().split(";")):
            number, _, rest = word.partition("=")
            ids, _, reason = rest.partition("/")
            sent = found.setdefault(int(number), SentTokens([]))
            token_ids = [int(token_id) for token_id in ids.split(",") if token_id]
            sent.token_ids += token_ids
            sent.sizes.append(len(token_ids))
            sent.finish_reason = reason or None
    return [found.get(number, SentTokens([])) for number in range(max(found, default=-1) + 1)]
