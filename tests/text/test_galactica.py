"""Sequences between Galactica's markers are split into characters, and nothing else is."""

from __future__ import annotations

import re

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from legato.text.galactica import MARKER, SequenceSplitter, without_markers


def galactica() -> Tokenizer:
    """Its steps, with a vocabulary that would merge what must stay apart."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    starts = [f"[{kind}_{name}]" for kind in ("START", "END") for name in ("DNA", "SMILES", "I_SMILES", "AMINO")]
    vocab = {token: number for number, token in enumerate([*starts, *alphabet, "CC", "CCO", "AC", "GT"])}
    merges = [("C", "C"), ("CC", "O"), ("A", "C"), ("G", "T")]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(MARKER, "removed"), pre_tokenizers.Split(Regex("[0-9]"), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(starts)
    return tokenizer


def tokens(text: str) -> list[str]:
    tokenizer = galactica()
    return tokenizer.encode(SequenceSplitter(tokenizer).marked(text)).tokens


@pytest.mark.parametrize("name", ["DNA", "SMILES", "I_SMILES", "AMINO"])
def test_what_is_between_is_single_characters(name: str) -> None:
    text = f"CCO [START_{name}]CCO ACGT[END_{name}]CCO"
    expected = ["CCO", "Ġ", f"[START_{name}]", *"CCO", "Ġ", *"ACGT", f"[END_{name}]", "CCO"]
    assert tokens(text) == expected


@pytest.mark.parametrize("text", ["CCO", "[START_DNA]CCO", "[START_DNA]CCO[END_AMINO]", "[START_REF]CCO[END_REF]"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert SequenceSplitter(galactica()).marked(text) == text
    assert "CCO" in tokens(text)


def test_other_tokenizers_get_no_markers() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    text = "[START_DNA]ACGT[END_DNA]"
    assert SequenceSplitter(tokenizer).marked(text) == text


def test_every_place_is_found_again() -> None:
    text = "ab[START_DNA]ACG[END_DNA]cd"
    marked = SequenceSplitter(galactica()).marked(text)
    places = without_markers(marked)
    assert len(places) == len(marked) + 1 and places[-1] == len(text)
    for found in re.finditer("[a-z]|A|C|G", marked.replace(MARKER, "-" * len(MARKER))):
        assert text[places[found.start()]] == found[0]
