"""The sampling parameters of all rows, and how the rows of one batch are sorted by what they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.sampling.params import Column, Feature, RowParams
from legato.sampling.randomness import counter

# These work on the rows that draw, not on the whole batch.
_FILTERS = (Feature.TOP_K, Feature.TOP_P, Feature.TYPICAL_P, Feature.MIN_P)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy that does not wait for what the device is still computing. The host's memory is read before it returns."""
    return host.to(device, non_blocking=True)


class RowTable:
    """One entry per row, on the device, written when a request enters the row.

    `users` is the host's own record of who needs what, so that deciding what to compute asks nothing of the device;
    `all_users` are the rows of any feature. A row that its request has left stays there until the next one enters.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.device = device
        self.params = [RowParams()] * max_rows
        self.users: dict[Feature, set[int]] = {feature: set() for feature in Feature}
        self.all_users: set[int] = set()
        self.version = 0  # grows with every write
        # How many tokens must still come before a row may end, for the rows that need `NO_END_YET`.
        self.tokens_before_end: dict[int, int] = {}
        self.numbers = torch.ones(len(Column), max_rows, device=device)
        # Both of these advance with every token, where a row draws or is watermarked.
        self.counters = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def write(self, row: int, params: RowParams, position: int, last_token: int) -> None:
        self.version += 1
        self.params[row] = params
        features = params.features
        self.tokens_before_end[row] = params.min_new_tokens - position
        if self.tokens_before_end[row] <= 0:
            features -= {Feature.NO_END_YET}
        for feature, rows in self.users.items():
            (rows.add if feature in features else rows.discard)(row)
        (self.all_users.add if features else self.all_users.discard)(row)
        if features:
            self.numbers[:, row] = on_device(torch.tensor(params.numbers), self.device)
            # Not by assignment, which waits for the device: torch copies the number from the host.
            self.counters[row].fill_(counter(params.seed, position))
            self.last_tokens[row].fill_(last_token)

    def count_down(self, rows: list[int]) -> None:
        """These rows got a token. The host knows that without asking what it is, so nothing is read back."""
        for row in self.users[Feature.NO_END_YET].intersection(rows):
            self.tokens_before_end[row] -= 1
            if self.tokens_before_end[row] == 0:
                self.users[Feature.NO_END_YET].discard(row)
                if not any(row in users for users in self.users.values()):
                    self.all_users.discard(row)
                self.version += 1


@dataclass(frozen=True, slots=True, eq=False)
class BatchPart:
    """The m rows of a batch that use one feature."""

    places: Tensor  # [m]: where they stand in what this is a part of
    rows: Tensor  # [m]: which rows of the table they are
    whole: bool  # the part is all of it, in order: nothing needs to be picked out
    numbers: tuple[Tensor, ...]  # [m, 1] for each column

    def number(self, column: Column) -> Tensor:
        return self.numbers[column]

    def take(self, x: Tensor) -> Tensor:
        """The part's lines of x: x itself where that is all of x, else a copy."""
        return x if self.whole else x.index_select(0, self.places)

    @contextmanager
    def edit(self, x: Tensor) -> Iterator[Tensor]:
        """The part's lines of x, to be changed in place: the changes are in x afterwards."""
        lines = self.take(x)
        yield lines
        if not self.whole:
            self.put(x, lines)

    def put(self, x: Tensor, lines: Tensor) -> None:
        x.index_copy_(0, self.places, lines)


class Composition:
    """Which rows of a batch need which operations. It is reused while consecutive steps have the same rows."""

    def __init__(self, table: RowTable, rows: list[int], vocab_size: int) -> None:
        self.rows = list(rows)
        self.version = table.version
        used = [feature for feature, users in table.users.items() if not users.isdisjoint(rows)]
        drawing = [row for row in rows if row in table.users[Feature.SAMPLE]]
        self.parts = _parts(table, {feature: drawing if feature in _FILTERS else rows for feature in used})

        def using(feature: Feature) -> list[tuple[int, RowParams]]:
            if feature not in used:
                return []
            return [(i, table.params[row]) for i, row in enumerate(rows) if row in table.users[feature]]

        self.max_top_k = max((params.top_k for _, params in using(Feature.TOP_K)), default=0)
        # For the batch's index i of each row that asked for the likeliest tokens, how many.
        self.top_n = {i: params.top_n_tokens for i, params in using(Feature.TOP_TOKENS)}
        # The biases of all rows, as places in the flattened scores and what to add there.
        biases = [
            (i * vocab_size + token, bias) for i, params in using(Feature.BIAS) for token, bias in params.token_bias
        ]
        if biases:
            places, values = zip(*biases, strict=True)
            self.bias_places = on_device(torch.tensor(places), table.device)
            self.bias_values = on_device(torch.tensor(values, dtype=torch.float32), table.device)
        # The end tokens of rows that may not end yet, as places in the flattened scores.
        ends = [i * vocab_size + token for i, params in using(Feature.NO_END_YET) for token in params.end_token_ids]
        if ends:
            self.end_places = on_device(torch.tensor(ends), table.device)

    def describes(self, table: RowTable, rows: list[int]) -> bool:
        """Whether it is still true: the same rows in the same order, and none written since."""
        return self.version == table.version and self.rows == rows


def _parts(table: RowTable, wholes: dict[Feature, list[int]]) -> dict[Feature, BatchPart]:
    """Each feature's part of its whole. The indices of all of them travel to the device together."""
    places = [
        [place for place, row in enumerate(whole) if row in table.users[feature]] for feature, whole in wholes.items()
    ]
    rows = [[whole[place] for place in part] for whole, part in zip(wholes.values(), places, strict=True)]
    flat = torch.tensor([index for part in places + rows for index in part], dtype=torch.int64)
    indices = torch.split(on_device(flat, table.device), [len(part) for part in places + rows])
    return {
        feature: BatchPart(on, of, len(of) == len(whole), table.numbers.index_select(1, of).unsqueeze(-1).unbind())
        for (feature, whole), on, of in zip(wholes.items(), indices[: len(wholes)], indices[len(wholes) :], strict=True)
    }
