"""Runs a tokenizer that is Python code, and writes it as a tokenizer.json: `python -m … FOLDER FILE`.

Most such classes wrap a vocabulary that the library has a word for: one of its own tokenizers, a SentencePiece model,
tiktoken's tables. What is made of it here must give the same tokens as the code for a list of awkward texts; if it does
not, the tokenizer is refused rather than served wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from legato.modelfiles.files import read_json
from legato.modelfiles.gguf.splitting import names_of_splittings
from legato.modelfiles.vocabularies import byte_level, pieces
from legato.modelfiles.vocabularies.sentencepiece import SentencePieceModel, is_sentencepiece
from legato.modelfiles.vocabularies.special import TokenizerSettings

CHECKED = [
    "", " ", "Hello, world!", "  two  spaces ", "\n\n\tdef f(x):\n    return x ** 2\r\n", "I'm you're WE'LL 'S",
    "123456789 1,000.00 0x1F", "Größe, naïve café e\u0301", "日本語のテキスト。中文，한국어", "Русский текст עברית ไทย",
    "🚀👨‍👩‍👧‍👦🏳️‍🌈", "a" * 40 + " " * 9 + "!?" * 9, "CamelCaseHTMLParser snake_case(x)[0];", "½ ² ٣٤ Ⅷ \u00a0\u3000x",
]  # fmt: skip


class Refused(Exception):
    """Why the code's tokenizer cannot be written down."""


def candidates(code: Any, path: Path) -> Iterator[Tokenizer]:
    """What the tokenizer may be, the likeliest first."""
    if (own := getattr(code, "backend_tokenizer", None)) is not None:
        yield own
        return
    settings = _settings(code, path)
    files = [Path(str(file)) for file in (getattr(code, "vocab_file", None),) if file]
    files += [*path.glob("*.model"), *path.glob("*.tiktoken")]
    for file in (file for file in files if file.is_file()):
        if is_sentencepiece(file):
            model = SentencePieceModel.read(file)
            yield from (build(model, settings) for build in (pieces.plain, pieces.llama))
        elif file.suffix in (".model", ".tiktoken"):
            yield from (byte_level.tiktoken(file, settings, name) for name in names_of_splittings())


def _settings(code: Any, path: Path) -> TokenizerSettings:
    """The special tokens as the code has them: it may well know more of them than its files."""
    config = read_json(path / "tokenizer_config.json", optional=True)
    base = len(getattr(code, "mergeable_ranks", None) or ())
    added = {int(i): AddedToken(str(token), special=True, normalized=False) for i, token in _added(code)}
    known = {**config, "additional_special_tokens": []}
    return TokenizerSettings(path, known, {i: token for i, token in added.items() if i >= base}, ())


def _added(code: Any) -> Iterator[tuple[int, object]]:
    yield from (getattr(code, "added_tokens_decoder", None) or {}).items()
    named = getattr(code, "special_tokens", None)  # Qwen's: by text
    if isinstance(named, dict):
        yield from ((number, text) for text, number in named.items())


def first_difference(tokenizer: Tokenizer, code: Any, texts: list[str]) -> str | None:
    for text in texts:
        ours, theirs = tokenizer.encode(text).ids, list(code(text)["input_ids"])
        if ours != theirs:
            return f"{text!r} is {theirs[:8]} in its code and {ours[:8]} in what was made of it"
    return None


def write(path: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    code = AutoTokenizer.from_pretrained(path, trust_remote_code=True, local_files_only=True)
    texts = CHECKED + [f"a {token} b" for token in list(getattr(code, "all_special_tokens", []))[:8]]
    problem: str | None = None
    for tokenizer in candidates(code, path):
        difference = first_difference(tokenizer, code, texts)
        if difference is None:
            tokenizer.save(str(target))
            return
        problem = problem or difference
    raise Refused(problem or "its class has neither a tokenizer of the library nor a SentencePiece or tiktoken file")


def main(words: list[str]) -> int:
    folder, target = map(Path, words)
    try:
        write(folder, target)
    except Exception as error:  # code from elsewhere raises anything
        reason = " ".join((str(error).strip().splitlines() or [""])[0].split())
        print(f"{type(error).__name__}: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
