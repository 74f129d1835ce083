"""The watermark: TGI's green lists, so that its detectors find them."""

from __future__ import annotations

import pytest
import torch

from legato.sampling.watermark import GreenLists

CPU = torch.device("cpu")


def green_ids(previous: int, vocab_size: int, gamma: float) -> set[int]:
    generator = torch.Generator()
    generator.manual_seed(15485863 * previous)
    return set(torch.randperm(vocab_size, generator=generator)[: int(vocab_size * gamma)].tolist())


@pytest.mark.parametrize("previous", [0, 1, 777, 49151])
@pytest.mark.parametrize("gamma", [0.25, 0.5])
def test_green_tokens_are_the_first_part_of_a_seeded_permutation(previous: int, gamma: float) -> None:
    greens = GreenLists(1001, CPU, gamma, 2.0)
    assert set(greens.mask(previous).nonzero()[:, 0].tolist()) == green_ids(previous, 1001, gamma)


def test_each_row_is_favoured_by_its_own_previous_token() -> None:
    greens = GreenLists(100, CPU, 0.5, 1.5)
    scores = torch.zeros(2, 100)
    greens.favour(scores, [3, 8])
    for line, previous in zip(scores, (3, 8), strict=True):
        assert set(line.nonzero()[:, 0].tolist()) == green_ids(previous, 100, 0.5)
        assert line.unique().tolist() == [0.0, 1.5]


def test_a_list_forgotten_and_made_again_is_the_same() -> None:
    greens = GreenLists(50, CPU, 0.5, 2.0)
    first = greens.mask(0)
    for previous in range(1, 400):
        greens.mask(previous)
    again = greens.mask(0)
    assert again is not first and torch.equal(again, first)


def test_a_list_in_use_is_not_made_again() -> None:
    greens = GreenLists(50, CPU, 0.5, 2.0)
    first = greens.mask(0)
    for previous in range(1, 400):
        greens.mask(previous)
        assert greens.mask(0) is first
