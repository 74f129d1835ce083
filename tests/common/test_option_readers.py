"""Every option that is offered does something: some code reads it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import legato
from legato.common.option import table
from legato.common.options import PROGRAMS

# Options that are read together are properties beside their definition.
DEFINITIONS = {"options.py", "frontend.py"}


def attributes_of_options(file: Path) -> Iterator[str]:
    """`options.name`, `self.options.name`, and what `self.name` says within the definitions themselves."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if "options" in name or (name == "self" and file.name in DEFINITIONS):
            yield node.attr


@pytest.fixture(scope="module")
def read() -> set[str]:
    files = Path(legato.__file__).parent.rglob("*.py")
    return {name for file in files for name in attributes_of_options(file)}


OFFERED = {
    option.name
    for program in PROGRAMS.values()
    for option in table(program)
    if option.later is None and option.no_effect is None
}


@pytest.mark.parametrize("name", sorted(OFFERED))
def test_an_option_that_is_offered_has_a_reader(name: str, read: set[str]) -> None:
    assert name in read
