"""A row whose logits are broken fails alone."""

from __future__ import annotations

import pytest
import torch

from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from legato.server.pending import NOT_FINITE
from tests.generation import generation, sampling
from tests.server.faults import FaultyServer
from tests.server.local import load
from tests.tiny_models import tiny_llama

BROKEN = 2  # the request, and in steps of all four its place: they are of one length


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    return load(tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1))


def requests() -> list[GenerationRequest]:
    kinds = [sampling(), sampling(do_sample=True, seed=3), sampling(), sampling(do_sample=True, seed=4, top_k=9)]
    return [generation(i, [5 + i] * 4, 6, kind, ignore_eos=True) for i, kind in enumerate(kinds)]


def run(model: CausalModel, breaks: dict[int, torch.Tensor] | None = None) -> FaultyServer:
    """`breaks` are the logits of the broken row at the n-th forward."""
    server = FaultyServer(model)
    compute, calls = server.engine.model.logits, 0

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        computed = compute(hidden)
        if breaks is not None and calls in breaks and len(computed) == 4:
            computed[BROKEN] = breaks[calls]
        return computed

    server.engine.model.logits = logits  # type: ignore[method-assign]
    server.run(requests())
    server.check_empty()
    return server


def one_bad(value: float) -> torch.Tensor:
    return torch.arange(320.0).where(torch.arange(320) != 7, value)


@pytest.mark.parametrize(
    "logits",
    [torch.full((320,), float("nan")), one_bad(float("nan")), one_bad(float("inf")), torch.full((320,), -float("inf"))],
    ids=["all NaN", "one NaN", "one infinite", "nothing possible"],
)
@pytest.mark.parametrize("forward", [1, 3])
def test_only_the_broken_row_fails_and_the_others_do_not_change_by_a_bit(
    model: CausalModel, logits: torch.Tensor, forward: int
) -> None:
    clean, broken = run(model), run(model, {forward: logits})
    assert broken.errors == {BROKEN: NOT_FINITE}
    for request_id in (0, 1, 3):
        assert broken.outputs[request_id] == clean.outputs[request_id]
    assert len(broken.outputs[BROKEN]) == forward - 1


def test_a_token_that_is_impossible_breaks_nothing(model: CausalModel) -> None:
    assert run(model, {2: one_bad(-float("inf"))}).errors == {}
