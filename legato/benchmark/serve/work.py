"""What to send: prompts and lengths are functions of the seed and the number of a request, not of the process that
sends it. The command sends all of this to the client processes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Api = Literal["tgi", "completions", "chat"]
PATHS: dict[Api, str] = {"tgi": "/generate_stream", "completions": "/v1/completions", "chat": "/v1/chat/completions"}

# Short, frequent words: one token each in nearly every vocabulary, with the space before them.
WORDS = (
    "apple bread river stone paper glass winter summer night music dance train plane ship road bridge tower wall roof"
    " door key lock ring gold silver iron wood fire smoke cloud rain snow storm wind wave beach island hill forest tree"
    " leaf root seed flower garden farm horse dog cat bird fish lion king queen prince knight sword shield battle peace"
    " letter story poem song dream sleep bed chair table lamp clock hour week month year past future truth secret"
)


@dataclass(frozen=True)
class Length:
    """A number of tokens, or a range around it: `spread` 0.5 goes from half to one and a half times `mean`."""

    mean: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> int:
        reach = round(self.mean * self.spread)
        return max(1, rng.randint(self.mean - reach, self.mean + reach))


@dataclass(frozen=True)
class LoadRequest:
    """A prompt, the tokens to generate, and the length of the prompt in tokens where it is known."""

    prompt: str | list[int]
    output_len: int
    input_len: int | None = None


@dataclass(frozen=True)
class RequestSource:
    """Makes the requests: from `dataset`, in its order and cyclically, or of random words."""

    seed: int
    input_len: Length
    output_len: Length
    words: list[str]
    dataset: list[LoadRequest] | None = None

    def request(self, number: int) -> LoadRequest:
        if self.dataset is not None:
            return self.dataset[number % len(self.dataset)]
        rng = random.Random(f"{self.seed}/{number}")
        input_len, output_len = self.input_len.draw(rng), self.output_len.draw(rng)
        return LoadRequest(" ".join(rng.choices(self.words, k=input_len)), output_len, input_len)


@dataclass(frozen=True)
class Target:
    """The server and what all requests to it have in common."""

    host: str
    port: int
    tls: bool
    api: Api
    prefix: str = ""
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def encode(self, request: LoadRequest) -> bytes:
        """The HTTP request."""
        body = msgspec.json.encode(self.body(request) | self.extra)
        lines = [f"POST {self.prefix}{PATHS[self.api]} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += ["Content-Type: application/json", "Accept: text/event-stream", f"Content-Length: {len(body)}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "\r\n"]).encode() + body

    def body(self, request: LoadRequest) -> dict[str, Any]:
        if self.api == "tgi":
            # A word may be two tokens: have the server truncate the prompt to the length that was asked for.
            truncate = {} if request.input_len is None else {"truncate": request.input_len}
            parameters = {"max_new_tokens": request.output_len, "ignore_eos": self.ignore_eos, "details": True}
            return {"inputs": request.prompt, "parameters": parameters | truncate}
        common: dict[str, Any] = {"model": self.model, "max_tokens": request.output_len, "temperature": 0.0}
        common |= {"stream": True, "ignore_eos": self.ignore_eos, "stream_options": {"include_usage": True}}
        if self.api == "completions":
            return {"prompt": request.prompt, **common}
        return {"messages": [{"role": "user", "content": request.prompt}], **common}


@dataclass(frozen=True)
class LoadLevel:
    """A closed loop of `concurrency` requests, or an open loop of `rate` requests per second."""

    concurrency: int | None = None
    rate: float | None = None
    num_requests: int | None = None
    duration: float | None = None

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g}/s"

    def arrivals(self, seed: int) -> Iterator[float]:
        """Seconds after the start at which requests arrive: a Poisson process, the same in every client process."""
        assert self.rate is not None
        rng = random.Random(f"{seed}/arrivals/{self.rate}")
        yield from itertools.accumulate(rng.expovariate(self.rate) for _ in itertools.count())

    def numbers(self) -> Iterator[int]:
        """The numbers of all requests."""
        return itertools.count() if self.num_requests is None else iter(range(self.num_requests))
