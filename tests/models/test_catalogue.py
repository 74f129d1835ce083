"""docs/models.md is fresh and complete, and every test that the catalogue names exists."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from legato.models.catalogue import CATALOGUE
from legato.models.registry import ARCHITECTURES


def exists(test: str) -> bool:
    """`path::function` or `path::function[id]`, of one that is parametrized once."""
    path, name, case = re.fullmatch(r"(.*)\.py::(\w+)(?:\[(.*)\])?", test).groups()  # type: ignore[union-attr]
    function = getattr(import_module(path.replace("/", ".")), name, None)
    if function is None or case is None:
        return function is not None
    (mark,) = function.pytestmark
    return case in {getattr(value, "id", value) for value in mark.args[1]}


def test_every_architecture_has_an_entry_and_every_entry_an_architecture() -> None:
    assert CATALOGUE.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("model_type", CATALOGUE)
def test_the_tests_that_an_entry_names_exist(model_type: str) -> None:
    entry = CATALOGUE[model_type]
    named = [entry.shard_test(world_size) for world_size in entry.shards] + [entry.gguf] * bool(entry.gguf)
    assert [test for test in named if not exists(test)] == []


def test_a_test_that_is_not_there_would_be_noticed() -> None:
    entry = CATALOGUE["llama"]
    assert exists(entry.shard_test(4)) and not exists(entry.shard_test(5))
