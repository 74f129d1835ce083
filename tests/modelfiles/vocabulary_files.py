"""Small vocabularies in the formats that came before tokenizer.json, as models on the Hub have them: trained here on a
few sentences, with the settings of the published ones."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, doesn't it? They're here; WE'LL see. I'd say 12345 times.",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2, 3]}  # comment\n\n\tif x != 10_000:\r\n\t\tpass",
    "Größe, naïve café, Ελληνικά, Русский текст, 日本語のテキスト。中文，한국어 텍스트, עברית, ไทย",
    "🚀 to the moon 👨‍👩‍👧‍👦! 3.14159 ½ ² ٣٤ — “quotes” … end.   spaces    here aaaa aaaaaaaa ----------",
    "She sells sea shells by the sea shore; the shells she sells are surely seashells, so if she sells shells",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness",
]
HOSTILE = [
    "", " ", "  ", "Hello  world   !", "\t\n \r\n\n  x", "I'm you're WE'LL 'S'Re'", "123456789 1,000.00 0x1F ½ ² ٣٤ Ⅷ",
    "éàü e\u0301 ﬁ Å", "🚀👨‍👩‍👧‍👦🏳️‍🌈", "日本語。中文，한국어", "</s>text</s> <s> <pad><unk> <0x0A> <bos>",
    "\u200b\u00a0\u3000x\x00\x7f", "a" * 40 + " " * 9 + "!?" * 9, "CamelCaseHTMLParser snake_case(x)[0];//ok", "▁▁ ▁x▁",
    "<|endoftext|>a <|endoftext|> b", " leading", "trailing ", "\ufeffbom", "\u202ertl\u202c", "\U0010ffff\ue000",
    "aaaaaaaaaaaaaaa aaaa", "---- ------- -", "<extra_id_0> <extra_id_99>",
]  # fmt: skip
PARTS = [
    *"abcdefgABC 0123456789.,!?'\n\t▁", "  ", "the", " the", "ing", "sea", "shell", "</s>", "<s>", "<pad>", "<unk>",
    "<mask>", "<|endoftext|>", "<extra_id_1>", "'s", "'LL", "é", "e\u0301", "ﬁ", "日", "本", "語", "🚀", "\u200d",
    "\u00a0", "ß", "Ω", "я", "한", "\x00", "\u3000", "\ufffd", "½", "\r\n", "[START_REF]", "aaaa", "--", "user",
]  # fmt: skip


def strings(count: int, seed: int = 0) -> list[str]:
    """Hostile ones, and random ones made of parts that tokenizers treat in their own ways, or of any characters."""
    chance = random.Random(seed)
    found = list(HOSTILE)
    while len(found) < count:
        length = chance.randint(1, 24)
        if chance.random() < 0.8:
            found.append("".join(chance.choices(PARTS, k=length)))
        else:
            points = (chance.choice((chance.randrange(0x20, 0x250), chance.randrange(0x300, 0xD800),
                                     chance.randrange(0xE000, 0x110000))) for _ in range(length))  # fmt: skip
            found.append("".join(map(chr, points)))
    return found


def write_config(folder: Path, model_type: str, tokenizer_config: dict[str, Any] | None, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if tokenizer_config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_merges(folder: Path, specials: list[str] | None = None) -> int:
    """vocab.json and merges.txt of a byte-level BPE of as many tokens as are returned."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials or [], initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.model.save(str(folder))
    return tokenizer.get_vocab_size()


def write_pieces(file: Path, kind: str, **settings: Any) -> None:
    """A SentencePiece model."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in SENTENCES * 3 for line in text.split("\n")),
        model_writer=model, model_type=kind, minloglevel=2, num_threads=1, hard_vocab_limit=False,
        **{"vocab_size": 420, "character_coverage": 0.98, **settings},
    )  # fmt: skip
    file.write_bytes(model.getvalue())


def write_tiktoken(file: Path) -> int:
    """A tiktoken file of as many tokens as are returned."""
    import tiktoken._educational as educational  # trains on bytes, as tiktoken does

    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    ranks = educational.bpe_train("\n".join(SENTENCES), 420, pattern, visualise=None)
    file.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()))
    return len(ranks)
