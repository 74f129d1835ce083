"""A draft model beside the model: it changes no text, and is followed where it is right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.common.errors import OptionError
from legato.common.options import ServerOptions
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from legato.server.loading import load as load_server
from legato.server.speculation.guessers import SmallModel
from tests.generation import generation, sampling
from tests.models.tiny_mamba import tiny_mamba
from tests.server.local import LocalServer, load
from tests.tiny_models import tiny_llama

NUM_TOKENS, NUM_DRAFTS = 40, 3
KINDS: list[dict[str, object]] = [
    {},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "temperature": 0.9, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same tokenizer and other weights."""
    folder = tiny_llama(tmp_path_factory.mktemp("draft"))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    changed = {name: torch.randn(tensor.shape, generator=generator) * 0.1 for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def requests(count: int = 12) -> list[GenerationRequest]:
    """Some share the beginning of their prompt; all texts are without repetition, so that no other drafts are found."""
    rng = random.Random(4)
    shared = [rng.randrange(64, 320) for _ in range(35)]
    return [
        generation(
            i,
            (shared if i % 3 == 0 else []) + [rng.randrange(64, 320) for _ in range(rng.randrange(1, 40))],
            NUM_TOKENS,
            sampling(seed=i, **KINDS[i % len(KINDS)]),
            ignore_eos=True,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 24, "max_rows": 6}, {"block_size": 4, "num_blocks": 700}])
def test_a_draft_model_that_is_the_model_is_always_right(model: CausalModel, settings: dict[str, int]) -> None:
    """Greedy and sampled, also where memory is scarce and rows are preempted."""
    expected = LocalServer(model).run(requests())
    server = LocalServer(model, speculate=NUM_DRAFTS, draft=SmallModel(model), **settings)
    assert server.run(requests(), random.Random(1)) == expected
    assert all(server.scheduler._drafter._proposals[depth] > 0.75 for depth in range(NUM_DRAFTS))
    num_drafts = sum(output.is_draft for outputs in server.outputs.values() for output in outputs)
    assert num_drafts / (12 * NUM_TOKENS) > 0.3


def test_a_draft_model_that_knows_nothing_changes_nothing(model: CausalModel, stranger: Path) -> None:
    server = LocalServer(model, speculate=NUM_DRAFTS, draft=SmallModel(load(stranger)))
    assert server.run(requests(), random.Random(1)) == LocalServer(model).run(requests())
    assert server.scheduler._drafter._proposals[0] < 0.6


def test_the_draft_model_is_loaded_beside_the_model(folder: Path, stranger: Path) -> None:
    loaded = load_server(ModelFiles.open(folder), ServerOptions(model_id=str(folder), speculate_model=str(stranger)))
    assert isinstance(loaded.draft, SmallModel) and loaded.draft.model is not loaded.model


@pytest.mark.parametrize(
    ("words", "problem"), [({"speculate": 0}, "disables drafts"), ({"speculate": 40}, "at most 16 tokens")]
)
def test_options_that_contradict_each_other_are_refused(folder: Path, words: dict[str, int], problem: str) -> None:
    options = ServerOptions(model_id=str(folder), speculate_model=str(folder), **words)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=problem):
        load_server(ModelFiles.open(folder), options)


def test_a_draft_model_that_keeps_a_state_is_refused(folder: Path, tmp_path: Path) -> None:
    """What a rejected draft changes in it could not be undone."""
    options = ServerOptions(model_id=str(folder), speculate_model=str(tiny_mamba(tmp_path)))
    with pytest.raises(OptionError, match=r"--speculate-model.*mamba"):
        load_server(ModelFiles.open(folder), options)


def test_a_draft_model_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    assert text.count('"a": ') == 1, "the token that this test renames"
    (other / "tokenizer.json").write_text(text.replace('"a": ', '"renamed": '))
    options = ServerOptions(model_id=str(folder), speculate_model=str(other))
    with pytest.raises(OptionError, match="--speculate-model"):
        load_server(ModelFiles.open(folder), options)
