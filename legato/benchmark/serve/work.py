"""What to send: prompts and lengths, each a function of the seed and its number, whichever process sends it.

Everything here travels from the command to the processes that make the load.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
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


class Length(msgspec.Struct, frozen=True):
    """A number of tokens, or a range around it: `spread` 0.5 goes from half to one and a half times `mean`."""

    mean: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> int:
        reach = round(self.mean * self.spread)
        return max(1, rng.randint(self.mean - reach, self.mean + reach))


class Job(msgspec.Struct, frozen=True):
    """One request: its prompt, how many tokens that is where we know, and how many to ask for."""

    prompt: str | list[int]
    output_len: int
    input_len: int | None = None


class Work(msgspec.Struct, frozen=True):
    """Where jobs come from: `dataset` in its order, again and again, or else random words."""

    seed: int
    input_len: Length
    output_len: Length
    words: list[str]
    dataset: list[Job] | None = None

    def job(self, number: int) -> Job:
        if self.dataset is not None:
            return self.dataset[number % len(self.dataset)]
        rng = random.Random(f"{self.seed}/{number}")
        input_len, output_len = self.input_len.draw(rng), self.output_len.draw(rng)
        return Job(" ".join(rng.choices(self.words, k=input_len)), output_len, input_len)


class Target(msgspec.Struct, frozen=True):
    """The server, and what every request to it has in common."""

    host: str
    port: int
    tls: bool
    api: Api
    prefix: str = ""
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True
    extra: dict[str, Any] = {}
    timeout: float = 600.0

    def request(self, job: Job) -> bytes:
        """The bytes of an HTTP request."""
        body = msgspec.json.encode(self.body(job) | self.extra)
        lines = [f"POST {self.prefix}{PATHS[self.api]} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += ["Content-Type: application/json", "Accept: text/event-stream", f"Content-Length: {len(body)}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "\r\n"]).encode() + body

    def body(self, job: Job) -> dict[str, Any]:
        if self.api == "tgi":
            # A word may be two tokens somewhere: the server cuts the prompt to the length that was asked for.
            cut = {} if job.input_len is None else {"truncate": job.input_len}
            parameters = {"max_new_tokens": job.output_len, "ignore_eos": self.ignore_eos, "details": True}
            return {"inputs": job.prompt, "parameters": parameters | cut}
        common: dict[str, Any] = {"model": self.model, "max_tokens": job.output_len, "temperature": 0.0, "stream": True}
        common |= {"ignore_eos": self.ignore_eos, "stream_options": {"include_usage": True}}
        if self.api == "completions":
            return {"prompt": job.prompt, **common}
        return {"messages": [{"role": "user", "content": job.prompt}], **common}


class Level(msgspec.Struct, frozen=True):
    """How hard to press: so many requests at once, or so many arriving every second, at random moments."""

    concurrency: int | None = None
    rate: float | None = None
    num_requests: int | None = None
    duration: float | None = None

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g}/s"

    def arrivals(self, seed: int) -> Iterator[float]:
        """Seconds after the start at which requests arrive: a Poisson process, the same one in every process."""
        assert self.rate is not None
        rng, moment = random.Random(f"{seed}/arrivals/{self.rate}"), 0.0
        while True:
            moment += rng.expovariate(self.rate)
            yield moment

    def numbers(self) -> Iterator[int]:
        """Of all requests, whoever sends them."""
        number = 0
        while self.num_requests is None or number < self.num_requests:
            yield number
            number += 1
