"""A typed view of config.json. A reader states the type of a key; a value of another type is an error that names it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from legato.common.errors import ModelFileError

# Beyond any model's vocabulary or context; a table of that many positions can still be made.
LARGEST_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class Keys:
    """Every method takes the names that a key goes by, the first one there counts; null is as good as absent."""

    raw: dict[str, Any]
    path: str = "config.json"

    def get(self, *names: str) -> Any:
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), None)

    def count(self, *names: str, default: int | None = None) -> int:
        """A size: a positive whole number of which tensors can be made."""
        value = self._there(names, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST_SIZE:
            raise self._wrong(names, f"a number from 1 to {LARGEST_SIZE}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self._there(names, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._wrong(names, "a number")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self._there(names, default)
        if not isinstance(value, bool):
            raise self._wrong(names, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        value = self._there(names, default)
        if not isinstance(value, str):
            raise self._wrong(names, "a string")
        return value

    def texts(self, *names: str, length: int) -> list[str] | None:
        """One string for each of `length` things (layers, as a rule), or None where the key is not there."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(item, str) for item in value):
            raise self._wrong(names, f"a list of {length} strings")
        return value

    def over(self, **defaults: Any) -> Keys:
        """With values for keys that are absent."""
        return Keys({**defaults, **{name: value for name, value in self.raw.items() if value is not None}}, self.path)

    def below(self, *names: str) -> Keys:
        """The object under a key; an empty one where there is none."""
        value = self.get(*names)
        if value is None:
            return Keys({}, self.path)
        if not isinstance(value, dict):
            raise self._wrong(names, "an object")
        return Keys(value, f"{self.path}, {names[0]}")

    def _there(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"{self.path} has no '{names[0]}'")
        return value

    def _wrong(self, names: tuple[str, ...], kind: str) -> ModelFileError:
        name = next((name for name in names if self.raw.get(name) is not None), names[0])
        return ModelFileError(f"{self.path}: '{name}' is {self.raw.get(name)!r}, not {kind}")
