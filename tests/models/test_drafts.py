"""Drafts, which every model verifies unless it cannot: the texts of all kinds of attention are the same with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legato.common.errors import OptionError
from legato.common.options import DEFAULT_DRAFTS, ServerOptions
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel, LimitedModel
from legato.scheduling.state import GenerationRequest
from legato.server.loading import load as load_server
from legato.server.model import Model
from tests.models import test_vision as vision
from tests.models.answers import LENGTHS, prompts
from tests.models.test_architectures import CASES
from tests.models.test_fallback import SERVED, fallback
from tests.models.tiny_hybrid import tiny_qwen3_next
from tests.models.tiny_mamba import tiny_mamba
from tests.models.tiny_more import tiny_bart
from tests.models.tiny_seeds import write
from tests.models.tiny_t5 import tiny_t5
from tests.server.local import LocalServer, load
from tests.tiny_models import tiny_llama

# Each has another mask, other positions or other keys and values; all others are for `make test-shards`.
ATTENTION = (
    "llama", "bloom", "opt", "falcon-7b", "mpt", "mistral", "gemma3", "phi3-longrope", "deepseek-v2", "gpt-oss",
)  # fmt: skip
PICTURES = ("qwen2-vl", "gemma3", "mllama", "paligemma")
THROUGH_TRANSFORMERS = ("exaone4",)
NUM_TOKENS = 40
STATES = ("mamba", "qwen3-next", "qwen3-5")
ALONE = [case for case in CASES if not case.start and not case.name.startswith(STATES)]


def some(names: tuple[str, ...], others: Any) -> list[Any]:
    marks = {True: [], False: [pytest.mark.shards]}
    return [pytest.param(name, marks=marks[name in names]) for name in others]


def check(server: Callable[[int], LocalServer], requests: list[GenerationRequest]) -> None:
    """The second time all answers are known, and most tokens are drafted. Some drafts are wrong: of random texts in
    few tokens, some have their last two in common."""
    expected = server(0).run(requests)
    drafting = server(DEFAULT_DRAFTS)
    for _ in range(2):
        assert drafting.run(requests) == expected
    num_drafts = sum(output.is_draft for outputs in drafting.outputs.values() for output in outputs)
    assert num_drafts > sum(map(len, expected.values())) / 4


def check_texts(model: CausalModel) -> None:
    asked = prompts(min(model.config.vocab_size, 317))
    if isinstance(model, LimitedModel):
        model.limit(max(LENGTHS) + NUM_TOKENS)
    requests = [GenerationRequest(i, ids, NUM_TOKENS, ignore_eos=True) for i, ids in enumerate(asked)]
    check(lambda drafts: LocalServer(model, speculate=drafts), requests)


@pytest.mark.parametrize("name", some(ATTENTION, [case.name for case in ALONE]))
def test_texts_are_the_same_with_drafts(name: str, tmp_path: Path) -> None:
    case = next(case for case in ALONE if case.name == name)
    check_texts(load(case.make(tmp_path, **case.changes)))


@pytest.mark.parametrize("name", some(THROUGH_TRANSFORMERS, SERVED))
def test_texts_are_the_same_through_transformers(name: str, tmp_path: Path) -> None:
    check_texts(fallback(write(tmp_path, name, SERVED[name], {})))


@pytest.mark.parametrize("name", some(PICTURES, vision.FAMILIES))
def test_texts_about_pictures_are_the_same(name: str, tmp_path: Path) -> None:
    seeing = vision.make(name, tmp_path)
    check(lambda drafts: seeing.server(num_blocks=512, speculate=drafts), vision.prompts(seeing))


# ---- the default -----------------------------------------------------------------------------------------------------


def drafts_of(folder: Path, **words: Any) -> tuple[int, int]:
    """What a router of ours may send, and what TGI's is told."""
    options = ServerOptions(model_id=str(folder), device="cpu", dtype="float32", **words)
    info = Model(load_server(ModelFiles.open(folder), options), options).info()
    return info.max_drafts, info.speculate


def test_drafts_are_the_default_and_0_disables_them(tmp_path: Path) -> None:
    """TGI's router would keep room for drafts that its calls never bring, unless it is asked to."""
    folder = tiny_llama(tmp_path)
    assert drafts_of(folder) == (DEFAULT_DRAFTS, 0)
    assert drafts_of(folder, speculate=0) == (0, 0)
    assert drafts_of(folder, speculate=3) == (3, 3)


@pytest.mark.parametrize("make", [tiny_t5, tiny_bart, tiny_mamba, tiny_qwen3_next])
def test_models_that_cannot_verify_drafts_have_none_and_refuse_them(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path)
    assert drafts_of(folder) == (0, 0) == drafts_of(folder, speculate=0)
    with pytest.raises(OptionError, match="--speculate"):
        drafts_of(folder, speculate=2)
