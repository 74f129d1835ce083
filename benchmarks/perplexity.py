"""Perplexity of a model in every quantization scheme, beside the dense one.

    python benchmarks/perplexity.py                                   the default model, all schemes
    python benchmarks/perplexity.py --also gptq-4-g64=FOLDER          and a quantized checkpoint

The text is local: by default the reference of the Python language that comes with CPython.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from pydoc_data import topics

import torch

from legato.common.options import ModelOptions
from legato.layers.kv_cache import KVCache
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.locate import locate
from legato.models.config import ModelConfig
from legato.models.registry import CausalModel, get_model
from legato.quantization.on_load import QUANTIZERS
from legato.server.loading import choose_device, choose_dtype
from legato.server.prepare import prepare
from legato.server.rows import Rows

BLOCK_SIZE = 16
RESULT = Path(__file__).parent / "results" / "perplexity.json"
# Names of one scheme: only the first is measured.
SCHEMES = [name for name in QUANTIZERS if name not in ("bitsandbytes", "eetq")]


def token_losses(model: CausalModel, ids: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Negative log-likelihood of every token but the first."""
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    rows = Rows(1, num_blocks, device)
    rows.admit(0, 0, ids, 0, False)
    rows.append_blocks(0, list(range(1, num_blocks + 1)))
    rows.write_blocks()
    step = replace(prepare(rows, [rows.advance(0, len(ids))], BLOCK_SIZE, dtype), logits_indices=None)
    cache = KVCache(model.kv_shape, num_blocks + 1, BLOCK_SIZE, device)
    with torch.inference_mode():
        logits = model.logits(model.forward(step, cache)).float()
        return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:], device=device), reduction="none")


def perplexity(
    path: Path, sequences: list[list[int]], quantize: str | None, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """And the seconds that it took."""
    files = ModelFiles.open(path)
    model = get_model(files, ModelConfig.from_hf(files.config()), dtype, device, quantize=quantize)
    started = time.perf_counter()
    losses = torch.cat([token_losses(model, ids, dtype, device) for ids in sequences])
    return math.exp(losses.mean().item()), time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or id; the default model if omitted")
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="comma-separated methods of --quantize")
    parser.add_argument("--also", action="append", default=[], help="NAME=FOLDER of a quantized checkpoint")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()

    path = locate(ModelOptions(model_id=options.model))
    files = ModelFiles.open(path)
    device = choose_device(options.device)
    dtype = choose_dtype(None, files.config(), device)
    text = options.text.read_text() if options.text else "\n\n".join(topics.topics.values())
    ids = files.tokenizer().encode(text, add_special_tokens=False).ids[: options.tokens]
    sequences = [ids[first : first + options.length] for first in range(0, len(ids) - 1, options.length)]
    cases: list[tuple[str, Path, str | None]] = [("dense", path, None)]
    cases += [(name, path, name) for name in options.schemes.split(",") if name]
    cases += [(name, Path(folder), None) for name, _, folder in (each.partition("=") for each in options.also)]
    measured: dict[str, dict[str, float]] = {}
    for name, folder, quantize in cases:
        value, seconds = perplexity(folder, sequences, quantize, device, dtype)
        dense = measured.get("dense", {}).get("perplexity", value)
        change = round(100 * (value / dense - 1), 2)
        measured[name] = {"perplexity": round(value, 4), "percent_above_dense": change, "seconds": round(seconds, 1)}
        print(f"{name:20} {value:9.4f} {change:+7.2f} %  {seconds:7.1f} s", flush=True)
    result = json.loads(options.result.read_text()) if options.result.exists() else {}
    result[options.model or "default"] = {
        "tokens": len(ids),
        "sequence_length": options.length,
        "text": str(options.text or f"pydoc topics of Python {platform.python_version()}"),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": str(dtype)[6:],
        "schemes": measured,
    }
    options.result.parent.mkdir(exist_ok=True)
    options.result.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
