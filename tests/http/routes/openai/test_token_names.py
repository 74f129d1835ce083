from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from legato.http.routes.openai.token_names import TokenNames
from legato.text.detokenize import Vocabulary
from tests.http.asgi import EOS, token_ids, tokenizer

BYTE_LEVEL = TokenNames(tokenizer(), Vocabulary(tokenizer()))


def sentencepiece() -> TokenNames:
    pieces = ["<unk>", "▁hello", "<0xE2>", "lo"]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TokenNames(made, Vocabulary(made))


def test_whole_characters_are_their_own_name() -> None:
    (world,) = token_ids(" world")
    assert (BYTE_LEVEL.of(world).text, BYTE_LEVEL.of(world).bytes) == (" world", list(b" world"))
    assert BYTE_LEVEL.of(EOS).text == "</s>"


@pytest.mark.parametrize("character", ["é", "€", "😀", "\u07ff", "\ufffd"])
def test_the_bytes_of_a_characters_tokens_are_the_characters(character: str) -> None:
    names = [BYTE_LEVEL.of(token_id) for token_id in token_ids(character)]
    assert bytes(byte for name in names for byte in name.bytes) == character.encode()
    assert names[0].text == f"bytes:\\x{character.encode()[0]:02x}"


def test_bytes_that_no_text_has() -> None:
    """All 256 bytes are in the vocabulary, also those that are part of no character."""
    ids = {tuple(BYTE_LEVEL.of(token_id).bytes) for token_id in range(tokenizer().get_vocab_size())}
    assert {(byte,) for byte in range(256)} <= ids


def test_sentencepieces_spaces_and_byte_tokens() -> None:
    names = sentencepiece()
    assert [names.of(token_id).text for token_id in (1, 2, 3)] == [" hello", "bytes:\\xe2", "lo"]
    assert names.of(2).bytes == [0xE2]


def test_a_row_that_the_tokenizer_has_no_token_for() -> None:
    assert BYTE_LEVEL.of(399).text == ""
