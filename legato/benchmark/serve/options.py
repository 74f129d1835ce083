"""The options of `legato bench serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from legato.common.option import Options, option


@dataclass(frozen=True, kw_only=True)
class Server(Options):
    """Server"""

    url: str = option("http://127.0.0.1:3000", "Where the server listens.", env=None)
    api: Literal["tgi", "completions", "chat"] = option(
        "tgi",
        "How to ask: `tgi` with /generate_stream, `completions` and `chat` with OpenAI's routes.",
        env=None,
    )
    model: str | None = option(
        None, "Name of the model in OpenAI's routes. Without it the first that the server lists.", env=None
    )
    api_key: str | None = option(None, "Sent as a bearer token.", env="LEGATO_API_KEY", secret=True)
    extra_body: str | None = option(
        None, 'Fields to add to every request or to replace in it, as a JSON object: `{"top_p": 0.9}`.', env=None
    )
    timeout: float = option(600.0, "Seconds after which a request counts as failed.", env=None, minimum=0.1)


@dataclass(frozen=True, kw_only=True)
class Pressure(Options):
    """Load"""

    concurrency: tuple[int, ...] = option(
        (),
        "Closed loop: requests that are out at once; each is followed by the next. Several, separated by commas, are"
        " measured one after the other. Without it, and without `--rate`, 16.",
        short="c",
        env=None,
    )
    rate: tuple[float, ...] = option(
        (),
        "Open loop instead: requests that arrive per second on average, at random moments, whether the server keeps up"
        " or not. Several, separated by commas, are measured one after the other.",
        short="r",
        env=None,
    )
    num_requests: int | None = option(
        None, "Requests of each measurement. Without it, and without `--duration`, 100.", short="n", env=None, minimum=1
    )
    duration: float | None = option(
        None, "Seconds during which requests are sent; those that are out then are waited for.", env=None, minimum=0.1
    )
    warmups: int = option(1, "Requests before those, one after the other, not measured.", env=None)
    processes: int | None = option(
        None, "Processes that make the load. Without it up to half of the cores.", env=None, minimum=1
    )
    seed: int = option(0, "Decides prompts, lengths and arrivals.", env=None)


@dataclass(frozen=True, kw_only=True)
class Prompts(Options):
    """Prompts and answers"""

    input_len: int = option(128, "Tokens of a prompt, which is random words.", env=None, minimum=1)
    input_spread: float = option(
        0.0, "Vary them by this share: 0.5 goes from half to one and a half times.", env=None, minimum=0, maximum=1
    )
    output_len: int = option(128, "Tokens to ask for.", env=None, minimum=1)
    output_spread: float = option(0.0, "Vary them by this share.", env=None, minimum=0, maximum=1)
    dataset: str | None = option(
        None,
        'Take prompts from this file instead: a JSON object on each line, `{"prompt": "...", "output_len": 200}`. Where'
        " the length is missing `--output-len` counts.",
        env=None,
    )
    tokenizer: str | None = option(
        None,
        "Folder, GGUF file or Hub id of the model, to make prompts of words that are exactly one token there. Without"
        " it words are likely to be; `tgi` cuts prompts to their length in any case.",
        env=None,
    )
    ignore_eos: bool = option(True, "Let no answer end early.", env=None)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Server, Pressure, Prompts):
    """Results"""

    slo_ttft: float | None = option(
        None, "Milliseconds within which the first token must come for a request to count as good.", env=None, minimum=0
    )
    slo_itl: float | None = option(
        None, "Milliseconds between tokens, on average over a request, for it to count as good.", env=None, minimum=0
    )
    json: str | None = option(None, "Write all figures to this file.", env=None)
    html: str | None = option(None, "Write a page with curves to this file.", env=None)
    no_tui: bool = option(False, "Plain lines even on a terminal.", env=None)
