"""API keys: where they come from, and what each of them allows.

A line of the key file is a key, or a key and `priority=N`: its holder may ask for that priority and every worse one.
Without it, a key allows the default priority and worse ones, so that nobody overtakes the holders of other keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from legato.common.errors import OptionError
from legato.scheduling.state import DEFAULT_PRIORITY, LAST_PRIORITY


def read_keys(keys: Iterable[str], path: str | None) -> dict[str, int]:
    """The keys of `--api-key` and of `--api-key-file`, and the best priority that each allows. A file that has none is
    a mistake: taken at its word, it would disable authentication."""
    found = dict.fromkeys(keys, DEFAULT_PRIORITY)
    if path is None:
        return found
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OptionError(f"--api-key-file {path} cannot be read: {cause}") from None
    in_file = [
        _key(line, f"--api-key-file {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not in_file:
        raise OptionError(f"--api-key-file {path} has no key: write one on a line of its own")
    return found | dict(in_file)


def _key(line: str, place: str) -> tuple[str, int]:
    """The line itself is not shown: it holds a secret."""
    key, *rest = line.split()
    if not rest:
        return key, DEFAULT_PRIORITY
    name, _, value = rest[0].partition("=")
    if len(rest) > 1 or name != "priority" or value not in map(str, range(LAST_PRIORITY + 1)):
        raise OptionError(f"{place}: expected a key, or a key and priority=N with N from 0 to {LAST_PRIORITY}")
    return key, int(value)


def tenant_of(key: str) -> str:
    """What the scheduler calls the holder of a key, so that the key itself goes no further."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
