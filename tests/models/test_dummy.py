from __future__ import annotations

import torch

from legato.models.dummy import DummyWeights


def made(name: str) -> torch.Tensor:
    return DummyWeights(torch.float32, torch.device("cpu")).tensor(name, (8, 8))


def test_a_name_gives_the_same_values_whatever_was_made_before() -> None:
    first = made("layers.0.weight")
    torch.randn(1)
    assert torch.equal(made("layers.0.weight"), first)
    assert not torch.equal(made("layers.1.weight"), first)
