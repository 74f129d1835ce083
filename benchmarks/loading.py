"""How long a checkpoint takes to load and what memory of the host that needs, against what the machine can do at best.

    python -m benchmarks.loading --out benchmarks/results/loading.json

Writes a Llama of noise in bfloat16, 8B in four files unless told otherwise, and starts `text-generation-server serve`
on it a few times: the seconds are those of its line "Weights loaded". The ceiling is one thread that reads the same
files from the page cache, and with a GPU a copy of pinned memory to it. All runs find the files in the page cache.
`--keep FOLDER` keeps the checkpoint there, or uses the one that an earlier run has left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from benchmarks.processes import leave_nothing_behind, stop
from legato.benchmark.report import environment, markdown, write_json
from legato.common.logging import parse
from legato.modelfiles.shapes import SHAPES

INDEX = "model.safetensors.index.json"
NOISE_NUMBERS = 1 << 22  # 8 MB, written again and again: random numbers are slower to make than to write
READ_BYTES = 16 << 20
COPY_BYTES, COPIES = 1 << 30, 8
SAMPLE_SECONDS = 0.005
SHOWN_LINES = 12
# Of the first the kernel keeps the peak; it is all that is resident, mapped files and libraries too.
MEMORY = ("VmHWM", "RssAnon", "RssFile", "RssShmem")
HEADER = (
    "Run", "Load s", "GB/s", "Start to loaded s", "Peak GB", "of largest file", "RssAnon GB", "RssFile GB",
    "RssShmem GB",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What is written, before it is."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    files: int

    @property
    def config(self) -> dict[str, Any]:
        """Of a Llama whose ends of text are within any vocabulary."""
        return SHAPES["tiny"] | {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocab,
        }

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of published files."""
        hidden, size = self.hidden, self.hidden // self.heads
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (self.heads * size, hidden),
            "self_attn.k_proj": (self.kv_heads * size, hidden),
            "self_attn.v_proj": (self.kv_heads * size, hidden),
            "self_attn.o_proj": (hidden, self.heads * size),
            "mlp.gate_proj": (self.inner, hidden),
            "mlp.up_proj": (self.inner, hidden),
            "mlp.down_proj": (hidden, self.inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        named = {
            f"model.layers.{number}.{name}.weight": shape
            for number in range(self.layers)
            for name, shape in layer.items()
        }
        first, last = {"model.embed_tokens.weight": (self.vocab, hidden)}, {"lm_head.weight": (self.vocab, hidden)}
        return {**first, **named, "model.norm.weight": (hidden,), **last}

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor -> file. Files have about the same size; there are fewer of them if there are too few tensors."""
        sizes = {name: math.prod(shape) for name, shape in self.tensors.items()}
        total = sum(sizes.values())
        starts = itertools.accumulate(sizes.values(), initial=0)
        parts = {name: start * self.files // total for name, start in zip(sizes, starts, strict=False)}
        used = sorted(set(parts.values()))
        return {name: f"model-{used.index(part) + 1:05}-of-{len(used):05}.safetensors" for name, part in parts.items()}


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """The index comes last: a folder without one was not finished."""
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    noise = np.random.default_rng(0).standard_normal(NOISE_NUMBERS, dtype=np.float32) * np.float32(0.02)
    # A bfloat16 is the upper half of a float32.
    data = memoryview((noise.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    tensors, weight_map = checkpoint.tensors, checkpoint.weight_map
    for file in dict.fromkeys(weight_map.values()):
        write_safetensors(folder / file, {name: tensors[name] for name in tensors if weight_map[name] == file}, data)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_safetensors(file: Path, tensors: dict[str, tuple[int, ...]], noise: memoryview) -> None:
    """One tensor after the other, so that nothing has to be held but the noise."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # tensors are aligned
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for left in range(end, 0, -len(noise)):
            out.write(noise[:left])


@contextmanager
def written(checkpoint: Checkpoint, keep: Path | None) -> Iterator[Path]:
    """The checkpoint's folder: one that is kept, or one for now."""
    with tempfile.TemporaryDirectory(prefix="legato-loading-") if keep is None else nullcontext(keep) as place:
        folder = Path(place)
        if keep is None or not _is_there(checkpoint, folder):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write(checkpoint, folder)
            except OSError as error:
                sys.exit(f"error: {folder}: {error.strerror}; name a folder with room for the checkpoint: --keep")
        yield folder


def _is_there(checkpoint: Checkpoint, folder: Path) -> bool:
    """Whether an earlier run has left it. Other files are never overwritten."""
    try:
        if not any(folder.iterdir()):
            return False
        config, index = (json.loads((folder / name).read_text()) for name in ("config.json", INDEX))
        if config == checkpoint.config and index["weight_map"] == checkpoint.weight_map:
            return True
    except FileNotFoundError:
        if not folder.exists():
            return False
    except (OSError, ValueError, KeyError, TypeError):
        pass
    sys.exit(f"error: --keep {folder}: holds something else than this checkpoint; name another folder, or empty it")


@dataclass(frozen=True)
class Files:
    count: int
    bytes: int
    largest: int

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Files:
        sizes = [path.stat().st_size for path in paths]
        return cls(len(sizes), sum(sizes), max(sizes))


@dataclass(frozen=True)
class Run:
    seconds: float  # as the server says, in hundredths
    start_seconds: float  # from the start of the process to that moment
    device: str
    dtype: str
    memory: dict[str, int]  # the peak of each kind until then, in bytes

    def rate(self, files: Files) -> float | None:
        """GB/s. None if it was over before a hundredth of a second was."""
        return files.bytes / self.seconds / 1e9 if self.seconds else None


class Peaks:
    """The largest figures of a process, looked at again and again by a thread."""

    def __init__(self, pid: int) -> None:
        self.bytes = dict.fromkeys(MEMORY, 0)
        self._status = Path(f"/proc/{pid}/status")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return self.bytes

    def _sample(self) -> None:
        while True:
            try:
                lines = self._status.read_text().splitlines()
            except OSError:  # gone
                return
            for name, _, rest in (line.partition(":") for line in lines):
                if name in MEMORY:
                    self.bytes[name] = max(self.bytes[name], int(rest.split()[0]) * 1024)
            if self._stop.wait(SAMPLE_SECONDS):
                return


def serve(folder: Path, device: str, patience: float) -> Run:
    """Start a server, and end it as soon as its weights are loaded."""
    with tempfile.TemporaryDirectory() as sockets:
        words = [sys.executable, "-m", "legato.server.cli", "serve", str(folder), f"--uds-path={sockets}/shard"]
        words += ["--json-output", f"--device={device}"]
        started = time.perf_counter()
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        limit = threading.Timer(patience, child.kill)
        try:
            limit.start()
            peaks = Peaks(child.pid)
            fields, lines = _wait_for_weights(child)
            seconds, memory = time.perf_counter() - started, peaks.stop()
        finally:
            limit.cancel()
            stop(child)
        if fields is None:
            late = f"had not loaded after {patience:g} s (--timeout)" if seconds >= patience else ""
            sys.exit("\n  ".join([f"error: the server {late or f'ended with code {child.returncode}'}:", *lines]))
        return Run(float(fields["seconds"]), seconds, fields["device"], fields["dtype"], memory)


def _wait_for_weights(child: subprocess.Popen[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """What it says about loading, or None once it has ended; and its last lines."""
    assert child.stdout is not None
    lines: list[str] = []
    for line in child.stdout:
        record = parse(line)
        if record is not None and record.getMessage() == "Weights loaded":
            return vars(record)["fields"], lines
        lines = [*lines[1 - SHOWN_LINES :], line.rstrip()]
    return None, lines


def read_seconds(paths: Sequence[Path]) -> float:
    """To read all of the files into one buffer, once they are in the page cache."""
    buffer = memoryview(bytearray(READ_BYTES))
    for _ in range(2):
        started = time.perf_counter()
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return time.perf_counter() - started


def copy_rate(device: str) -> float | None:
    """GB/s from pinned memory to the GPU, at best. None without one."""
    if device == "cpu":
        return None
    import torch  # takes seconds, for this alone

    if not torch.cuda.is_available():
        return None
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda", pin_memory=False)
    times: list[float] = []
    for _ in range(COPIES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return COPY_BYTES / min(times) / 1e9


def summary(files: Files, runs: Sequence[Run], reading: float, copying: float | None) -> str:
    best = min(run.seconds for run in runs)
    share = f"; the fastest run loads at {reading / best:.1%} of that" if best else ""
    lines = [
        f"{files.bytes / 1e9:.2f} GB in {files.count} files, the largest of {files.largest / 1e9:.2f} GB,"
        f" to {runs[0].device} in {runs[0].dtype}.",
        markdown(HEADER, [_row(number, run, files) for number, run in enumerate(runs, 1)]),
        f"Reading the files from the page cache takes {reading:.2f} s, {files.bytes / reading / 1e9:.2f} GB/s{share}.",
    ]
    if copying is not None:
        lines.append(f"Pinned memory is copied to the GPU at {copying:.2f} GB/s.")
    return "\n\n".join(lines)


def _row(number: int, run: Run, files: Files) -> list[str]:
    rate = run.rate(files)
    peak, anon, file, shared = (run.memory[name] for name in MEMORY)
    return [
        str(number),
        f"{run.seconds:.2f}",
        "-" if rate is None else f"{rate:.2f}",
        f"{run.start_seconds:.2f}",
        f"{peak / 1e9:.2f}",
        f"{peak / files.largest:.2f}",
        f"{anon / 1e9:.2f}",
        f"{file / 1e9:.2f}",
        f"{shared / 1e9:.2f}",
    ]


def to_json(files: Files, runs: Sequence[Run], reading: float, copying: float | None) -> dict[str, Any]:
    return {
        "files": asdict(files),
        "ceilings": {
            "read_seconds": reading,
            "read_gb_per_second": files.bytes / reading / 1e9,
            "pinned_copy_gb_per_second": copying,
        },
        "runs": [
            {
                **asdict(run),
                "gb_per_second": run.rate(files),
                "peak_of_largest_file": run.memory["VmHWM"] / files.largest,
            }
            for run in runs
        ],
    }


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds and memory of loading a checkpoint.")
    defaults = dict(layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocab=128256, files=4)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default)
    parser.add_argument("--repeat", type=positive, default=3, help="times that the server is started")
    parser.add_argument("--device", default="auto", help="what text-generation-server takes")
    parser.add_argument("--timeout", type=positive, default=300, help="seconds that the server has for loading")
    parser.add_argument("--keep", type=Path, help="folder to keep the checkpoint in, and to find it in again")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(**{name: getattr(options, name) for name in defaults})
    started = time.perf_counter()
    with written(checkpoint, options.keep) as folder:
        print(f"The checkpoint is there after {time.perf_counter() - started:.1f} s.", file=sys.stderr, flush=True)
        paths = sorted({folder / file for file in checkpoint.weight_map.values()})
        reading = read_seconds(paths)
        runs: list[Run] = []
        for number in range(1, options.repeat + 1):
            runs.append(serve(folder, options.device, options.timeout))
            print(f"Run {number} of {options.repeat}: {runs[-1].seconds:.2f} s", file=sys.stderr, flush=True)
        # Last: a GPU that is in use is opened faster by the next process.
        figures = (Files.of(paths), runs, reading, copy_rate(options.device))
    print(summary(*figures))
    if options.out is not None:
        work = {**asdict(checkpoint), "device": options.device, "repeat": options.repeat}
        write_json(options.out, {**environment(), "work": work, **to_json(*figures)})


if __name__ == "__main__":
    leave_nothing_behind()
    main()
