"""Random numbers: the right bits, evenly spread, and unrelated to their neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from legato.sampling.randomness import STRIDE, counter, uniform

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """Vigna's function on Python's integers: the mixed value of one state."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def draws(seeds: range, positions: range) -> Tensor:
    """[seeds, positions]"""
    starts = torch.tensor([counter(seed, positions.start) for seed in seeds])
    return uniform(starts[:, None] + STRIDE * torch.arange(len(positions)))


def chi_square_is_ordinary(observed: Tensor, expected: Tensor) -> bool:
    """Within five standard deviations of what chance gives, on either side: the draws are fixed, so this is too."""
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    freedom = observed.numel() - 1
    return abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def test_known_values_of_splitmix64() -> None:
    # The published sequence for state 0, in the upper 53 bits.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = torch.tensor([counter(0, position) for position in range(3)])
    assert uniform(states).tolist() == [(value >> 11) * 2.0**-53 for value in published]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 1000, 10**7])
def test_tensor_arithmetic_has_the_bits_of_exact_arithmetic(seed: int, position: int) -> None:
    state = splitmix64(seed) + (position + 1) * 0x9E3779B97F4A7C15
    drawn = uniform(torch.tensor([counter(seed, position)])).item()
    assert drawn == (splitmix64(state) >> 11) * 2.0**-53


def test_a_stride_is_one_position() -> None:
    step = torch.tensor([counter(5, 41)]) + STRIDE
    assert step.item() == counter(5, 42)


def test_draws_of_consecutive_seeds_and_positions_are_evenly_spread() -> None:
    u = draws(range(1000), range(200))
    assert bool(((u >= 0) & (u < 1)).all())
    observed = torch.histc(u.flatten().double(), bins=256, min=0, max=1)
    assert chi_square_is_ordinary(observed, torch.full((256,), u.numel() / 256))


def test_the_first_draws_of_consecutive_seeds_are_evenly_spread() -> None:
    observed = torch.histc(draws(range(50_000), range(1)).flatten().double(), bins=64, min=0, max=1)
    assert chi_square_is_ordinary(observed, torch.full((64,), 50_000 / 64))


def pairs_are_independent(first: Tensor, second: Tensor) -> bool:
    bins = 16
    cells = (first * bins).long() * bins + (second * bins).long()
    observed = torch.bincount(cells.flatten(), minlength=bins * bins).double()
    return chi_square_is_ordinary(observed, torch.full((bins * bins,), cells.numel() / bins**2))


def test_consecutive_positions_are_independent() -> None:
    u = draws(range(500), range(201))
    assert pairs_are_independent(u[:, :-1], u[:, 1:])


def test_consecutive_seeds_are_independent() -> None:
    u = draws(range(501), range(200))
    assert pairs_are_independent(u[:-1], u[1:])


def test_a_seed_and_the_next_position_of_its_neighbour_are_independent() -> None:
    u = draws(range(501), range(201))
    assert pairs_are_independent(u[1:, :-1], u[:-1, 1:])
