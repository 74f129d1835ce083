"""In which order the parts of a step are computed, and what attention is told about them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from legato.kernels.attention.mixed import MixedLengths
from legato.server.prepare import Packed, _mixed_spans, decodes_first
from legato.server.rows import Rows, RowStep


def decode(row: int, start: int) -> RowStep:
    return RowStep(row, start, 1, samples=True, decode=True)


def chunk(row: int, start: int, count: int) -> RowStep:
    return RowStep(row, start, count, samples=False, decode=False)


def test_decodes_come_first_and_the_longest_of_them_before_all() -> None:
    parts = [chunk(0, 500, 8), decode(1, 20), decode(2, 300), chunk(3, 0, 90), decode(4, 21), decode(5, 300)]
    assert [parts[place].row for place in decodes_first(parts)] == [2, 5, 4, 1, 0, 3]


def test_attention_of_decodes_and_prompts_together_is_told_their_lengths() -> None:
    rows = {row: SimpleNamespace(input_ids=np.arange(1000)) for row in (2, 3)}
    packed = Packed(cast(Rows, rows), [decode(0, 300), decode(1, 20), chunk(2, 0, 90), chunk(3, 500, 10)])
    spans = _mixed_spans(packed, torch.device("cpu"))
    assert spans.cu_seqlens_q.tolist() == [0, 1, 2, 92, 102]
    assert spans.lengths == MixedLengths(2, 301 + 21, 301, 90 * 45 + 10 * 505)
