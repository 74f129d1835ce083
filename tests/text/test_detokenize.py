from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from legato.text.detokenize import REPLACEMENT, Vocabulary

CORPUS = ["the quick brown fox jumps over the lazy dog", "héllo wörld, 日本語 и русский 🙂👍🏽", "a b  c   d\n\te"] * 20


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Added by hand: one that looks like bytes, one that cannot be, one with letters that stand for other bytes.
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("two words"), AddedToken("é")])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2's layout: metaspace words, byte tokens for what the vocabulary lacks, one leading space stripped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        limit_alphabet=40,
    )
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    # The trainer takes byte tokens only as special ones; in a real vocabulary they are ordinary.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(state))


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
VOCABULARIES = {"byte_level": Vocabulary(BYTE_LEVEL), "sentencepiece": Vocabulary(SENTENCEPIECE)}
TOKENIZERS = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}
both = pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])


def pieces(kind: str, ids: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = VOCABULARIES[kind].detokenizer(context or [])
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def byte_ids(text: str) -> list[int]:
    return [id_of(SENTENCEPIECE, f"<0x{byte:02X}>") for byte in text.encode()]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def test_the_trained_tokenizers_are_what_they_claim() -> None:
    assert set(VOCABULARIES["sentencepiece"].special.values()) == {"<unk>", "<s>", "</s>"}
    assert set(VOCABULARIES["byte_level"].special.values()) == {"<s>", "</s>"}
    assert SENTENCEPIECE.decode(byte_ids("日")) == "日"


@settings(max_examples=400)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40))
def test_byte_level_pieces_join_to_the_whole_for_any_tokens(ids: list[int]) -> None:
    assert "".join(pieces("byte_level", ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


ordinary = st.integers(259, SENTENCEPIECE.get_vocab_size() - 1).map(lambda token_id: [token_id])
special = st.integers(0, 2).map(lambda token_id: [token_id])
in_bytes = st.characters(codec="utf-8", exclude_characters=REPLACEMENT).map(byte_ids)


@settings(max_examples=400)
@given(st.lists(st.one_of(ordinary, special, in_bytes), max_size=20))
def test_sentencepiece_pieces_join_to_the_whole_for_whole_characters(parts: list[list[int]]) -> None:
    ids = [token_id for part in parts for token_id in part]
    assert "".join(pieces("sentencepiece", ids)) == SENTENCEPIECE.decode(ids, skip_special_tokens=True)


@both
@given(text=st.text(max_size=60))
def test_what_was_encoded_comes_back(kind: str, text: str) -> None:
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    assert "".join(pieces(kind, ids)) == TOKENIZERS[kind].decode(ids)


@both
def test_an_emoji_of_many_tokens_appears_whole(kind: str) -> None:
    ids = byte_ids("🙂") if kind == "sentencepiece" else BYTE_LEVEL.encode("🤖").ids
    assert len(ids) > 1
    *waiting, last, flushed = pieces(kind, ids)
    assert set(waiting) == {""}
    assert last in "🙂🤖" and flushed == ""


@both
def test_no_replacement_character_before_the_end(kind: str) -> None:
    ids = byte_ids("日")[:2] if kind == "sentencepiece" else BYTE_LEVEL.encode("🤖").ids[:1]
    *shown, flushed = pieces(kind, ids)
    assert "".join(shown) == ""
    assert set(flushed) == {REPLACEMENT}


def test_a_broken_byte_does_not_take_back_what_was_shown() -> None:
    assert "".join(pieces("sentencepiece", [*byte_ids("日"), *byte_ids("本")[:1]])) == "日" + REPLACEMENT


def test_endless_broken_bytes_do_not_pile_up() -> None:
    (stray,) = byte_ids("日")[1:2]
    shown = pieces("sentencepiece", [stray] * 50)
    assert "".join(shown) == REPLACEMENT * 50
    assert shown[3] == REPLACEMENT * 4


@both
def test_special_tokens_leave_the_text_alone(kind: str) -> None:
    name, special_id = "</s>", id_of(TOKENIZERS[kind], "</s>")
    half = byte_ids("日") if kind == "sentencepiece" else BYTE_LEVEL.encode("🤖").ids
    assert "".join(pieces(kind, [half[0], special_id, *half[1:]])) in {"日", "🤖"}
    assert VOCABULARIES[kind].text(special_id) == name


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_without_one() -> None:
    ids = SENTENCEPIECE.encode("fox", add_special_tokens=False).ids
    prompt = SENTENCEPIECE.encode("the quick brown", add_special_tokens=False).ids
    assert "".join(pieces("sentencepiece", ids)) == "fox"
    assert "".join(pieces("sentencepiece", ids, context=prompt)) == " fox"


def test_one_token_on_its_own() -> None:
    (letter,) = BYTE_LEVEL.encode("x").ids
    vocabulary = VOCABULARIES["byte_level"]
    assert vocabulary.text(letter) == "x"
    assert vocabulary.text(BYTE_LEVEL.encode("🤖").ids[0]) == REPLACEMENT
    assert vocabulary.text(10**6) == ""
