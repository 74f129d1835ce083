"""The results of `legato doctor`: one finding per check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` says what to do; only what is in order has none."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert bool(self.remedy) is (self.verdict != "ok"), f"{self.subject}: a finding needs a remedy, and only then"


def ok(subject: str, found: str) -> Finding:
    return Finding(subject, "ok", found)


def warning(subject: str, found: str, remedy: str) -> Finding:
    """It serves, but less well than it could, or not in every case."""
    return Finding(subject, "warning", found, remedy)


def problem(subject: str, found: str, remedy: str) -> Finding:
    """It does not serve."""
    return Finding(subject, "problem", found, remedy)


def examined(subject: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """All findings of one part. A part that fails is a finding itself: the others are still wanted."""
    try:
        return list(look())
    except Exception as error:
        found = f"could not be examined ({type(error).__name__}: {error})"
        return [warning(subject, found, "report this, with the output of `legato env`")]
