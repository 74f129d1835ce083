"""The options of both benchmarks. Those of text-generation-benchmark up to `top_n_tokens` are TGI's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

from legato.common.errors import OptionError
from legato.common.option import Options, option
from legato.modelfiles.shapes import SHAPES

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
DEFAULT_WORKLOADS = ("G1", "G2", "G3", "G4")
SHAPE_NAMES = ", ".join(f"`{name}`" for name in SHAPES)


@dataclass(frozen=True, kw_only=True)
class Work(Options):
    """What to measure"""

    tokenizer_name: str | None = option(
        None,
        "Folder or Hub id of the model whose tokenizer makes the prompts. Without it prompts are random token ids.",
        short="t",
    )
    revision: str = option("main", "Branch, tag or commit of the tokenizer's Hub repository.")
    batch_size: tuple[int, ...] = option(
        BATCH_SIZES, "Requests computed together; repeat it or separate by commas.", short="b"
    )
    sequence_length: int = option(10, "Tokens of each prompt.", short="s", minimum=1)
    decode_length: int = option(8, "Tokens to generate for each prompt.", short="d", minimum=1)
    runs: int = option(10, "Measured runs for each batch size.", short="r", minimum=1)
    warmups: int = option(1, "Runs before those, not measured.", short="w")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """What was given, or TGI's six."""
        sizes = self.batch_size or BATCH_SIZES
        if min(sizes) < 1:
            raise OptionError(f"--batch-size {min(sizes)}: a batch has at least one request")
        return sizes


@dataclass(frozen=True, kw_only=True)
class Choosing(Options):
    """How tokens are chosen"""

    temperature: float | None = option(None, "Divides the logits.", minimum=0)
    top_k: int | None = option(None, "Keep the k most probable tokens.")
    top_p: float | None = option(None, "Keep the most probable tokens that reach this share.", minimum=0, maximum=1)
    typical_p: float | None = option(None, "Keep the most typical tokens that reach this share.", minimum=0, maximum=1)
    repetition_penalty: float | None = option(None, "Makes tokens that were there before less likely.", minimum=0)
    frequency_penalty: float | None = option(None, "The same, the more the oftener they were there.")
    watermark: bool = option(False, "Mark the text as generated.")
    do_sample: bool = option(False, "Draw tokens at random instead of taking the most probable one.")
    top_n_tokens: int | None = option(None, "Also ask for the n most probable tokens at every step.")


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(Work, Choosing):
    """Shard and results"""

    master_shard_uds_path: str = option(
        "/tmp/text-generation-server-0", "Unix socket of the (first) shard to measure.", short="m"
    )
    spawn: str | None = option(
        None,
        "Start a shard for this model instead, with the arguments after `--`, and end it afterwards. Takes what"
        f" text-generation-server serves, or one of {SHAPE_NAMES} for random weights of that shape.",
        env=None,
    )
    json: str | None = option(None, "Write all figures to this file.", env=None)
    html: str | None = option(None, "Write a page with curves to this file.", env=None)
    no_tui: bool = option(False, "Plain lines even on a terminal.", env=None)


@dataclass(frozen=True, kw_only=True)
class EngineWork(Options):
    """What to run"""

    workload: tuple[str, ...] = option(
        DEFAULT_WORKLOADS,
        "`G1` one stream, `G2` 256 streams, `G3` long prompts, `G4` mixed lengths, `prefix` shared prefixes, or `all`;"
        " repeat it or separate by commas.",
        env=None,
    )
    repeat: int = option(3, "Runs of each workload; the best is reported.", env=None, minimum=1)
    duration: int | None = option(
        None,
        "Repeat all of it for so many seconds instead, and fail if the shard's memory has grown. For leaks, not speed.",
        env=None,
        minimum=1,
    )
    scale: int = option(1, "Divide the workloads' counts and lengths by this, for small machines.", env=None, minimum=1)
    requests: int | None = option(None, "A workload of your own: how many requests.", env=None, minimum=1)
    prompt: int | None = option(None, "A workload of your own: tokens of each prompt.", env=None, minimum=1)
    new: int | None = option(None, "A workload of your own: tokens to generate for each.", env=None, minimum=1)

    @property
    def is_custom(self) -> bool:
        return (self.requests, self.prompt, self.new) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineWork):
    """Shard and results"""

    model: str | None = option(
        None,
        f"What the shard serves: a folder, a GGUF file, a Hub id, or one of {SHAPE_NAMES} for random weights of that"
        " shape. Without it the default model.",
        env=None,
    )
    socket: str | None = option(None, "Measure the shard on this unix socket instead of starting one.", env=None)
    max_rows: int = option(512, "Requests that run at once.", env=None, minimum=1)
    max_total_tokens: int = option(4096, "Longest prompt and answer together.", env=None, minimum=2)
    step_tokens: int | None = option(
        None, "Tokens that one step may compute. Without it the router's own default.", env=None, minimum=1
    )
    json: str | None = option(None, "Write all figures to this file.", env=None)


def takes_shard_arguments(command: click.Command) -> click.Command:
    """Let the command take `-- ARGUMENTS...` for the shard that it starts."""
    command.params.append(click.Argument(["shard_args"], nargs=-1, type=click.UNPROCESSED))
    return command


def shard_arguments(starts_shard: bool, cure: str) -> tuple[str, ...]:
    """What came after `--` on the command line of the command that is running."""
    words: tuple[str, ...] = click.get_current_context().params["shard_args"]
    if words and not starts_shard:
        raise OptionError(f"{words[0]!r} is for a shard that the benchmark starts: {cure}")
    return words


def check_writable(flag: str, path: str | None) -> None:
    """A wrong path should end the benchmark before it has run, not after."""
    if path is None:
        return
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"--{flag} {path}: {folder} has no place for such a file that this user may write")
