"""Rope with two sets of divisors (Phi-3's long contexts): which set a server turns with, and what transformers says.

transformers goes by the length of each text, a server by the longest that it takes. They agree on texts on the same
side of the original context as the server's limit; of the others we ask a transformers that has one set only.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from legato.models.registry import LimitedModel
from tests.models import tiny_today as today
from tests.models.answers import step_logits
from tests.models.oracle import oracle_logits
from tests.server.local import load
from tests.server.shard import Log, finish, load_model, prefill, request, serving, warmup
from tests.tiny_models import greedy_oracle

ORIGINAL = 64
NUM_TOKENS = 12
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = today.long_rope(8)
    return today.tiny_phi3(
        tmp_path_factory.mktemp("phi3"), original_max_position_embeddings=ORIGINAL, rope_parameters=rope
    )


@pytest.fixture(scope="module")
def long_only(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for an oracle that shall turn short texts, too, with the long set."""
    copy = tmp_path_factory.mktemp("long")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"]
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return copy


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]


def logits(folder: Path, longest: int, sequences: list[list[int]]) -> list[torch.Tensor]:
    model = load(folder)
    assert isinstance(model, LimitedModel)
    model.limit(longest)
    return step_logits(model, sequences)


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("longest", "lengths"), [(ORIGINAL, (1, 17, ORIGINAL)), (4 * ORIGINAL, (ORIGINAL + 1, 100, 4 * ORIGINAL))]
)
def test_texts_on_the_side_of_the_limit_are_those_of_transformers(
    folder: Path, longest: int, lengths: tuple[int, ...]
) -> None:
    sequences = texts(*lengths)
    assert largest_difference(logits(folder, longest, sequences), oracle_logits(folder, sequences)) < TOLERANCE


def test_a_short_text_beside_long_ones_turns_with_the_long_set(folder: Path, long_only: Path) -> None:
    sequences = texts(30, 200)
    ours = logits(folder, 4 * ORIGINAL, sequences)
    assert largest_difference(ours, oracle_logits(long_only, sequences)) < TOLERANCE
    assert largest_difference(ours[:1], oracle_logits(folder, sequences[:1])) > 100 * TOLERANCE


@pytest.mark.parametrize("longest", [ORIGINAL, 2 * ORIGINAL])
def test_a_shard_chooses_by_the_limit_that_it_is_warmed_up_for(
    folder: Path, long_only: Path, tmp_path: Path, longest: int
) -> None:
    (prompt,) = texts(20)

    async def converse() -> Log:
        log = Log()
        async with serving(load_model(folder), tmp_path / "shard-0") as shard:
            await shard.Warmup(warmup(max_total_tokens=longest))
            await finish(shard, log, log.add(await shard.Prefill(prefill(1, request(1, prompt, NUM_TOKENS)))))
        return log

    oracle = folder if longest == ORIGINAL else long_only
    assert asyncio.run(converse()).tokens[1] == greedy_oracle(oracle, [prompt], NUM_TOKENS)[0]
    assert greedy_oracle(folder, [prompt], NUM_TOKENS) != greedy_oracle(long_only, [prompt], NUM_TOKENS)
