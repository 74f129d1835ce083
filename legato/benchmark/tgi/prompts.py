"""Prompts of an exact number of tokens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from legato.pb import generate_pb2 as pb

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEED = 0
FILLER = (
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore et dolore"
    " magna aliqua. Ut enim ad minim veniam, quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo"
    " consequat. "
)


def id_prompts(count: int, length: int, vocab_size: int) -> list[pb.Request]:
    """Random ids, the same ones every time. No tokenizer is asked, so the length is exact by itself."""
    rng = random.Random(SEED)
    return [pb.Request(input_ids=[rng.randrange(vocab_size) for _ in range(length)]) for _ in range(count)]


def text_prompts(count: int, length: int, tokenizer: Tokenizer) -> list[pb.Request]:
    """The same text for all. The shard cuts it to `length` tokens, which is why it may be too long but not too short:
    a text that ends between two tokens can be tokenized otherwise than it was cut."""
    copies = 1
    while len(ids := tokenizer.encode(FILLER * copies).ids) < length:
        copies *= 2
    text = tokenizer.decode(ids[:length])
    if len(tokenizer.encode(text).ids) < length:
        text = FILLER * copies
    return [pb.Request(inputs=text, truncate=length, add_special_tokens=True) for _ in range(count)]
