"""HTTP options: limits of requests, and access to the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from legato.common.errors import OptionError
from legato.common.option import Options, option

MIN_ROUTE_KEY = 16


@dataclass(frozen=True, kw_only=True)
class RequestOptions(Options):
    """Request limits and features"""

    max_best_of: int = option(2, "Maximum `best_of`.", minimum=1)
    max_stop_sequences: int = option(4, "Maximum stop sequences per request.")
    max_top_n_tokens: int = option(5, "Maximum `top_n_tokens`.")
    max_client_batch_size: int | None = option(
        None,
        "Maximum prompts per completions request, or inputs per embeddings request. Default: 4 prompts, 2048 inputs.",
        minimum=1,
    )
    max_image_fetch_size: int = option(1 << 30, "Maximum size of a fetched image, in bytes.")
    max_image_bytes: int = option(1 << 24, "Maximum size of an image, sent or fetched, in bytes.", minimum=1)
    max_image_pixels: int = option(1 << 24, "Maximum size of an image, in pixels.", minimum=1)
    image_url_allow: tuple[str, ...] = option(
        (), "Hosts from which images may be fetched, comma-separated or repeated. Default: none."
    )
    payload_limit: int = option(2_000_000, "Maximum size of a request body, in bytes.", minimum=1)
    validation_workers: int = option(2, "Tokenizer threads per HTTP worker.")
    enable_prefill_logprobs: bool = option(
        False, "Allow requests for prompt logprobs.", no_effect="Legato always allows them", always_so=True
    )
    disable_grammar_support: bool = option(False, "Refuse requests with a grammar or a response format.")
    schema_lenient: bool = option(
        False,
        "Ignore JSON schema keywords that cannot be enforced, with a warning. Default: such schemas are refused.",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "harmony", "json"] = option(
        "auto", "Format of the model's tool calls. `auto` derives it from the chat template."
    )
    reasoning_parser: Literal[
        "auto",
        "none",
        "qwen3",
        "deepseek_r1",
        "seed_oss",
        "mistral",
        "command_a",
        "kimi_vl",
        "medgemma",
        "gemma4",
        "granite",
        "gpt_oss",
    ] = option("auto", "Format of the model's reasoning. `auto` derives it from the chat template.")
    reasoning_budget: int | None = option(
        None, "Maximum reasoning tokens for requests that set no limit themselves. Default: no limit.", minimum=0
    )
    response_store: str | None = option(
        None,
        "SQLite file for the responses that `/v1/responses` stores. Default: in memory, lost when the router ends.",
    )
    response_store_size: int = option(
        32 << 20,
        "Maximum total size of stored responses, in bytes; beyond it, the oldest responses of the API key that uses"
        " the most space are dropped. 0 stores none.",
        minimum=0,
    )
    tokenizer_config_path: str | None = option(
        None, "Path of a `tokenizer_config.json` whose chat template and special tokens replace the model's."
    )


@dataclass(frozen=True, kw_only=True)
class HttpOptions(Options):
    """HTTP"""

    hostname: str = option(
        "0.0.0.0", "IP address to listen on, or `localhost`. Other host names mean 0.0.0.0, with a warning."
    )
    port: int = option(3000, "Port to listen on.", short="p", minimum=1, maximum=65535)
    http_workers: int | None = option(
        None,
        "Number of HTTP worker processes, which also tokenize and detokenize. Default: half the CPU cores that affinity"
        " and the container allow, at most 8.",
        minimum=1,
    )
    prometheus_port: int = option(
        9000,
        "Separate port for Prometheus metrics, in addition to `/metrics` on the main port, with the same keys and"
        " encryption; 0 disables it. If the port is in use, the server logs a warning and starts without it.",
        minimum=0,
        maximum=65535,
    )
    cors_allow_origin: tuple[str, ...] = option(
        (), "Origins of web pages that may call the server (CORS), comma-separated or repeated. Default: any."
    )
    api_key: tuple[str, ...] = option(
        (),
        "API keys, comma-separated or repeated; requests must send one as a bearer token. Default: no authentication.",
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "File with API keys, one per line, `#` for comments. `KEY priority=N` allows that key priority N (0 is the"
        " highest) and lower ones; default: 5 and lower, so that no key overtakes others. `KEY adapters` allows that"
        " key to load and unload LoRA adapters (`--lora-allow-runtime`).",
    )
    route_key: str | None = option(
        None,
        "Secret shared with `legato route`, at least 16 characters. With it, streams of a lost replica continue on"
        " another. Default: none, and such streams end with an error.",
        secret=True,
    )
    kv_events: bool = option(
        False,
        "Record which blocks enter and leave the prefix cache, for routers that read `GET /replica/events` with the"
        " route key.",
    )
    kv_events_endpoint: str | None = option(
        None,
        "Also publish these events over ZeroMQ in vLLM's format at this address, such as `tcp://10.0.0.7:5557`. They"
        " contain the tokens of all prompts, and anyone who can reach the address can read them. Default: not"
        " published.",
    )
    ssl_certfile: str | None = option(
        None, "TLS certificate, with its chain, in PEM format. Default: connections are not encrypted."
    )
    ssl_keyfile: str | None = option(
        None, "Private key of `--ssl-certfile`, not encrypted. Default: in the same file as the certificate."
    )
    graceful_termination_timeout: int = option(
        90, "Time for running requests to finish after a stop signal, in seconds.", short="g"
    )
    ngrok: bool = option(False, "Expose the server through an ngrok tunnel.", later="ngrok tunnels")
    ngrok_authtoken: str | None = option(None, "ngrok auth token.", later="ngrok tunnels")
    ngrok_edge: str | None = option(None, "ngrok edge.", later="ngrok tunnels")
    usage_stats: Literal["on", "off", "no-stack"] = option(
        "on", "TGI's usage statistics.", no_effect="Legato never sends any", always_so=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # An unset variable in a start script must not disable authentication.
        if "api_key" in self.given and not self.api_key:
            raise OptionError("--api-key is empty: give a key, or omit the flag to serve without authentication")
        check_route_key(self.route_key)
        if self.kv_events and self.route_key is None:
            raise OptionError("--kv-events needs --route-key: events contain the tokens of all prompts")


def check_route_key(key: str | None) -> None:
    if key is not None and (len(key) < MIN_ROUTE_KEY or not key.isascii() or not key.isprintable() or " " in key):
        raise OptionError(f"--route-key must have at least {MIN_ROUTE_KEY} ASCII characters and no spaces")


def vertex_port(environ: Mapping[str, str]) -> int | None:
    """Where Vertex AI will call. Only Vertex AI sets the variable, in every container, so it overrides --port."""
    port = environ.get("AIP_HTTP_PORT") or None
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        raise OptionError(f"AIP_HTTP_PORT is {port!r}: it must be a port between 1 and 65535")
    return None if port is None else int(port)
