"""Galactica reads chemical formulas, DNA and proteins character by character: between [START_SMILES] and [END_SMILES]
and their like every character is a piece of its own.

Its tokenizer splits at a marker and drops it. Whoever encodes a text puts the marker before the characters, as in the
model's training.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer

MARKER = "SPL1T-TH1S-Pl3A5E"
_SEQUENCE = re.compile(r"(\[START_(DNA|SMILES|I_SMILES|AMINO)])(.*?)(\[END_\2])")


class SequenceSplitter:
    """Marks the texts of a tokenizer that splits at the marker; those of all others stay as they are."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        splits = tokenizer.pre_tokenizer
        self.is_needed = splits is not None and MARKER.encode() in splits.__getstate__()

    def marked(self, text: str) -> str:
        return _SEQUENCE.sub(_with_markers, text) if self.is_needed and "[START_" in text else text


def without_markers(marked: str) -> list[int]:
    """For each place in a marked text, and for its end, the place in the text before it was marked."""
    places: list[int] = []
    at = origin = 0
    while at < len(marked):
        if marked.startswith(MARKER, at):
            places += [origin] * len(MARKER)
            at += len(MARKER)
        else:
            places.append(origin)
            at, origin = at + 1, origin + 1
    return [*places, origin]


def _with_markers(found: re.Match[str]) -> str:
    start, _, sequence, end = found.groups()
    return f"{start}{''.join(MARKER + character for character in sequence)}{MARKER}{end}"
