"""The shape of a JSON answer: which fields it has, of which types, whatever texts and numbers are in them.

    details.tokens[].logprob: number

A field that is null counts as absent: TGI's snapshots are of client objects, which have all fields. `shapes.json` has
the shapes of the snapshots in TGI's repository and is written from a clone of it:

    python -m tests.tgi.shapes CLONE > tests/tgi/shapes.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Fields whose value is part of the shape.
LITERAL = {"object", "role", "type"}
STORED = Path(__file__).with_name("shapes.json")
SNAPSHOTS = "integration-tests/models/__snapshots__"


def shape(value: Any, at: str = "") -> set[str]:
    """One line for each field, the fields of all items of a list together."""
    if isinstance(value, dict):
        return {line for name, item in value.items() for line in shape(item, f"{at}.{name}" if at else name)}
    if isinstance(value, list):
        return {line for item in value for line in shape(item, f"{at}[]")}
    if value is None:
        return set()
    if at.rpartition(".")[2] in LITERAL:
        return {f"{at} = {value}"}
    kinds = {bool: "boolean", int: "number", float: "number", str: "string"}
    return {f"{at}: {kinds[type(value)]}"}


def stored() -> dict[str, set[str]]:
    """By `FILE/TEST` of TGI's repository."""
    return {name: set(lines) for name, lines in json.loads(STORED.read_text()).items()}


def main() -> None:
    from tests.tgi.test_tgi import CASES

    folder = Path(sys.argv[1]) / SNAPSHOTS
    shapes = {case.name: sorted(shape(json.loads((folder / f"{case.name}.json").read_text()))) for case in CASES}
    json.dump(dict(sorted(shapes.items())), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
