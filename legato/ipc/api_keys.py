"""API keys: where they come from, and what each of them allows.

A line of the key file is a key, and behind it what its holder may do. `priority=N`: ask for that priority and every
worse one; without it, a key allows the default priority and worse ones, so that nobody overtakes the holders of other
keys. `adapters`: load and unload LoRA adapters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from legato.common.errors import OptionError
from legato.scheduling.state import DEFAULT_PRIORITY, LAST_PRIORITY


@dataclass(frozen=True, slots=True)
class KeyRights:
    """What the holder of a key may do."""

    priority: int = DEFAULT_PRIORITY  # the best that may be asked for
    adapters: bool = False


def read_keys(keys: Iterable[str], path: str | None) -> dict[str, KeyRights]:
    """The keys of `--api-key` and of `--api-key-file`, and what each allows. A file that has none is a mistake: taken
    at its word, it would disable authentication."""
    found = dict.fromkeys(keys, KeyRights())
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


def _key(line: str, place: str) -> tuple[str, KeyRights]:
    """The line itself is not shown: it holds a secret."""
    key, *words = line.split()
    rights = KeyRights()
    for word in words:
        name, _, value = word.partition("=")
        if word == "adapters" and not rights.adapters:
            rights = replace(rights, adapters=True)
        elif name == "priority" and value in map(str, range(LAST_PRIORITY + 1)):
            rights = replace(rights, priority=int(value))
        else:
            raise OptionError(
                f"{place}: expected a key, or a key and priority=N with N from 0 to {LAST_PRIORITY}, or adapters"
            )
    return key, rights


def tenant_of(key: str) -> str:
    """What the scheduler calls the holder of a key, so that the key itself goes no further."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
