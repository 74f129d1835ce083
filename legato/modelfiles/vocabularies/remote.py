"""Tokenizers that are Python code in the model's repository.

With --trust-remote-code the code runs once, in a process of its own, which writes what it makes of the vocabulary as a
tokenizer.json into the cache. All other processes read that file: they need neither the code nor transformers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.modelfiles.cache import cache_folder
from legato.modelfiles.vocabularies.find import BYTE_LEVEL, SENTENCEPIECE

CONVERTER = "legato.models.remote_tokenizer"
# What tells two versions of a tokenizer apart.
SOURCES = ("*.py", "*.json", "*.model", "*.txt", "*.tiktoken")
TIMEOUT_S = 300


def has_own_code(path: Path, tokenizer_config: dict[str, Any]) -> bool:
    """Whether only code of the repository can make the tokenizer: there is no tokenizer.json, and the class is not one
    whose files are read here."""
    named = tokenizer_config.get("auto_map")
    is_code = "AutoTokenizer" in named if isinstance(named, dict) else bool(named)
    is_known = str(tokenizer_config.get("tokenizer_class")).removesuffix("Fast") in {*BYTE_LEVEL, *SENTENCEPIECE}
    return is_code and not is_known and not (path / "tokenizer.json").exists()


def converted(path: Path) -> Path:
    """Where the converted tokenizer is, or will be: named after the content of the files it is made of."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in path.glob(pattern)):
        if not file.name.endswith(".index.json"):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return cache_folder(None) / "tokenizers" / f"{digest.hexdigest()}.json"


def convert(path: Path) -> None:
    """Run the repository's code, unless that was done before."""
    target = converted(path)
    if target.exists():
        return
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedModel(
            f"{path}: its tokenizer is Python code, which transformers runs: pip install 'legato[transformers]'"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    words = [sys.executable, "-m", CONVERTER, str(path), str(partial)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ModelFileError(f"{path}: its tokenizer's code cannot be used: {reason}")
        partial.replace(target)
    except subprocess.TimeoutExpired:
        raise ModelFileError(f"{path}: its tokenizer's code did not finish within {TIMEOUT_S} s") from None
    finally:
        partial.unlink(missing_ok=True)
