"""sentence-transformers behind a pipe, for `benchmarks.embeddings`: lists of texts in, vectors and seconds out.

    python in_sentence_transformers.py FOLDER

Each line of stdin is `{"lists": [[TEXT, …], …], "out": FILE}`; each list is one call of `encode`.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import sentence_transformers


def main() -> None:
    model = sentence_transformers.SentenceTransformer(sys.argv[1], device="cpu")
    print(json.dumps({"version": sentence_transformers.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        vectors = [model.encode(texts, batch_size=32, show_progress_bar=False) for texts in asked["lists"]]
        seconds = time.perf_counter() - started
        np.save(asked["out"], np.concatenate(vectors))
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
