from __future__ import annotations

import pytest

from legato.grammar.matcher import MaskWriter
from legato.grammar.vocabulary import TokenTrie
from tests.grammar.texts import EOS, json_tokenizer, trie_of


@pytest.fixture(scope="session")
def trie() -> TokenTrie:
    return trie_of(json_tokenizer())


@pytest.fixture(scope="session")
def writer(trie: TokenTrie) -> MaskWriter:
    assert trie.tokenizer.eos_token == EOS
    return MaskWriter(trie, num_threads=1)
