"""What all ranks must have in common: the version, the options that change what is computed, and the model's files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from legato import __version__
from legato.common.option import Options
from legato.common.options import ServerOptions
from legato.common.program import forward

# Of each file of weights so many pieces are compared, besides its size: all of a large model would take minutes.
NUM_PIECES, PIECE = 32, 1 << 12
SMALL = 1 << 20
# Options that may differ: paths, logs, and what says which shard it is.
OF_ONE_MACHINE = {
    "uds-path", "rank", "world-size", "group-id", "node-addrs", "master-addr", "json-output", "logger-level",
    "huggingface-hub-cache", "weights-cache-override", "otlp-endpoint", "otlp-service-name", "prefix-cache-mb",
    "cluster-certfile", "cluster-keyfile", "cluster-cafile",
    "cuda-memory-fraction", "speculate-model", "lora-adapters", "lora-allow",
}  # fmt: skip
IGNORED = {".lock", ".log", ".md"}


def comparable_words(options: Options) -> list[str]:
    """Those options of a shard, as command line words, that must be the same on all machines."""
    words = [word for word in forward(options, ServerOptions) if word.startswith("--")]
    return sorted(word for word in words if word[2:].partition("=")[0] not in OF_ONE_MACHINE)


def identity(options: Options, model: Path) -> dict[str, str]:
    """One value for each thing to compare, so that a difference can be named."""
    words = " ".join(comparable_words(options))
    return {"version": __version__, "options": words, "model": model_fingerprint(model)}


def difference(ours: Mapping[str, str], theirs: object) -> str | None:
    """What the other rank has that we have not; None if there is nothing."""
    if not isinstance(theirs, dict):
        return "the other rank does not say what it runs"
    for name, mine in ours.items():
        other = str(theirs.get(name))
        if other != mine and name == "options":
            left = [word for word in mine.split() if word not in other.split()]
            right = [word for word in other.split() if word not in mine.split()]
            return f"options differ: here {' '.join(left) or 'none'}, there {' '.join(right) or 'none'}"
        if other != mine and name == "model":
            return "the files of the model differ"
        if other != mine:
            return f"{name} differs: here {mine}, there {other}"
    return None


def model_fingerprint(path: Path) -> str:
    """Of all files of a folder, or of a GGUF file: small ones whole, of large ones the size and some pieces."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    for file in files:
        if file.name.startswith(".") or file.suffix in IGNORED:
            continue
        size = file.stat().st_size
        digest.update(json.dumps([file.name if file != path else "", size]).encode())
        with file.open("rb") as opened:
            if size <= SMALL:
                digest.update(opened.read())
                continue
            for number in range(NUM_PIECES):
                opened.seek((size - PIECE) * number // (NUM_PIECES - 1))
                digest.update(opened.read(PIECE))
    return digest.hexdigest()
