"""Perplexity of a model as the server computes it, beside transformers with the same weights in float32.

    python -m benchmarks.served_perplexity                                   the default model, 50,000 tokens
    python -m benchmarks.served_perplexity --json FILE -- --dtype float32    other options of the launcher after --

The server scores prompts over HTTP (`/v1/completions` with `echo`); prompts are token ids, so that both score the same.
transformers gets the weights as they are in the file, GGUF blocks expanded to float32. The text is local: the reference
of the Python language that comes with CPython. Exits with 1 if the two differ by more than `--most-percent`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data import topics
from typing import Any

from benchmarks.processes import HOST, launched, leave_nothing_behind
from legato.benchmark.cpu.models import CpuModel
from legato.benchmark.report import environment, markdown, write_json

REQUEST_SECONDS = 600.0
# Sequences that the server scores at once.
AT_ONCE = 2


def local_text(file: Path | None) -> str:
    return file.read_text() if file else "\n\n".join(topics.topics.values())


def sequences_of(model: CpuModel, num_tokens: int, length: int, text: str) -> list[list[int]]:
    ids = model.files.tokenizer().encode(text, add_special_tokens=False).ids[:num_tokens]
    found = [ids[first : first + length] for first in range(0, len(ids), length)]
    return [each for each in found if len(each) > 1]


def served_losses(port: int, ids: list[int]) -> list[float]:
    """Negative log-likelihood of every token but the first, by the server."""
    body = {"model": "m", "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
        found = json.load(answer)["choices"][0]["logprobs"]["token_logprobs"]
    assert len(found) == len(ids) and found[0] is None, f"{len(found)} log probabilities for {len(ids)} tokens"
    return [-value for value in found[1:]]


def served(words: Sequence[str], sequences: list[list[int]]) -> list[float]:
    """Of all tokens, by a launcher with these arguments."""
    with (
        launched("--logger-level=error", *words) as (port, _),
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        return [loss for losses in pool.map(lambda ids: served_losses(port, ids), sequences) for loss in losses]


def reference(folder: Path, sequences: list[list[int]]) -> list[float]:
    """The same by transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    losses: list[float] = []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        for ids in sequences:
            logits = model(torch.tensor([ids])).logits[0, :-1]
            losses += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()
    return losses


def perplexity(losses: Sequence[float]) -> float:
    return math.exp(math.fsum(losses) / len(losses))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or id; the default model if omitted")
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--reference", type=Path, help="file to keep transformers' figures in, from run to run")
    parser.add_argument("--most-percent", type=float, default=0.5, help="difference that is accepted")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("extra", nargs="*", help="options of the launcher, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = CpuModel(given.model, Path(scratch))
        sequences = sequences_of(model, given.tokens, given.length, local_text(given.text))
        began = time.perf_counter()
        ours = served([f"--model-id={model.path}", *given.extra], sequences)
        seconds = time.perf_counter() - began
        if given.reference and given.reference.exists():
            theirs = json.loads(given.reference.read_text())
        else:
            theirs = reference(model.dense_folder(), sequences)
        if given.reference:
            given.reference.write_text(json.dumps(theirs))
    if len(theirs) != len(ours):
        sys.exit(f"error: {given.reference} has {len(theirs)} tokens, this run {len(ours)}: delete it")
    percent = 100 * (perplexity(ours) / perplexity(theirs) - 1)
    largest = max(abs(mine - other) for mine, other in zip(ours, theirs, strict=True))
    rows = [["transformers, float32", f"{perplexity(theirs):.4f}", ""]]
    rows.append([" ".join(["Legato", *given.extra]), f"{perplexity(ours):.4f}", f"{percent:+.3f} %"])
    print(markdown(["", "Perplexity", "Difference"], rows))
    print(f"\n{len(ours):,} tokens in sequences of {given.length}; largest difference of one token {largest:.4f} nats")
    figures: dict[str, Any] = {
        "model": model.path.name,
        "launcher_options": given.extra,
        "tokens": len(ours),
        "sequence_length": given.length,
        "text": str(given.text or "pydoc topics"),
        "perplexity": perplexity(ours),
        "transformers_perplexity": perplexity(theirs),
        "percent": percent,
        "largest_token_difference": largest,
        "seconds_served": seconds,
    }
    write_json(given.json, {**environment(), **figures})
    return 1 if abs(percent) > given.most_percent else 0


if __name__ == "__main__":
    leave_nothing_behind()
    sys.exit(main())
