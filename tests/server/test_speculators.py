"""Medusa and MLP-speculator checkpoints in their published layouts: they change no text, and are followed if right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.common.errors import ModelFileError
from legato.common.options import ServerOptions
from legato.cpu.library import library
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.locate import locate
from legato.modelfiles.speculator import SpeculatorFiles
from legato.models.host import HostDecoder
from legato.models.registry import CausalModel
from legato.models.speculators import Speculator, load_speculator
from legato.scheduling.state import GenerationRequest
from legato.server.loading import load as load_server
from tests.generation import generation, sampling
from tests.server.local import DEVICE, LocalServer, load
from tests.tiny_models import tiny_llama

NUM_HEADS = 3
NUM_TOKENS = 40


class Base:
    """A model that says one token after another in a fixed order: its layers add nothing, and its head has the
    embeddings of the tokens before."""

    def __init__(self, folder: Path, repeats: bool = False, **changes: Any) -> None:
        """One that `repeats` says the same token again and again: its own head knows all tokens to come."""
        self.folder, self.repeats = tiny_llama(folder, **changes), repeats
        file = self.folder / "model.safetensors"
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        generator = torch.Generator().manual_seed(3)
        embeddings = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=generator)
        self.vocab_size, self.size = embeddings.shape
        order = torch.randperm(self.vocab_size, generator=generator)
        self.before = torch.empty_like(order)
        self.before[order.roll(0 if repeats else -1)] = order  # of each token, the one that leads to it
        self.embeddings = embeddings
        tensors["model.embed_tokens.weight"] = embeddings
        tensors["lm_head.weight"] = self.head(1)
        save_file(tensors, file, metadata={"format": "pt"})
        config = json.loads((self.folder / "config.json").read_text())
        (self.folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))

    def head(self, distance: int) -> torch.Tensor:
        """A matrix that gives the token `distance` after the one whose state it sees the highest logit."""
        source = torch.arange(self.vocab_size)
        for _ in range(distance):
            source = self.before[source]
        return self.embeddings[source].clone()


@pytest.fixture(scope="module", params=[False, True])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("base"), repeats=request.param)


@pytest.fixture(scope="module")
def model(base: Base) -> CausalModel:
    return load(base.folder)


def medusa(base: Base, folder: Path, version: int, knows: bool) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for head in range(NUM_HEADS):
        scale = 0.0 if knows else 1.0
        tensors[f"{head}.0.linear.weight"] = scale * torch.randn(base.size, base.size)
        tensors[f"{head}.0.linear.bias"] = scale * torch.randn(base.size)
        if version == 1:
            tensors[f"{head}.1.weight"] = base.head(head + 2)
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return configured(folder, base, medusa_num_heads=NUM_HEADS, medusa_num_layers=1)


def mlp_speculator(base: Base, folder: Path, tied: bool, knows: bool) -> Path:
    """One that knows adds nothing of the state to the token, and finds what follows that."""
    vocab_size, size, tensors = base.vocab_size, base.size, {}
    known = torch.nn.functional.gelu(torch.nn.functional.rms_norm(base.head(1), (size,)))
    known = torch.nn.functional.normalize(known - known.mean(0), dim=1)
    for i in range(NUM_HEADS):
        if i == 0 or not tied:
            tensors[f"speculator.emb.{i}.weight"] = base.embeddings.clone() if knows else torch.randn(vocab_size, size)
            tensors[f"speculator.ln.{i}.weight"] = torch.ones(size)
            tensors[f"speculator.ln.{i}.bias"] = torch.zeros(size)
            tensors[f"speculator.head.{i}.weight"] = known.clone() if knows else torch.randn(vocab_size, size)
        if i < 2 or not tied:
            tensors[f"speculator.proj.{i}.weight"] = (0.0 if knows else 1.0) * torch.randn(size, size)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return configured(
        folder, base, model_type="mlp_speculator", architectures=["MLPSpeculatorPreTrainedModel"], n_predict=NUM_HEADS,
        emb_dim=size, inner_dim=0, tie_weights=tied, scale_input=tied, vocab_size=vocab_size,
    )  # fmt: skip


def configured(folder: Path, base: Base, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base.folder)}))
    return folder


CASES = {
    "medusa v1": lambda base, folder, knows: medusa(base, folder, 1, knows),
    "medusa v2": lambda base, folder, knows: medusa(base, folder, 2, knows),
    "mlp speculator": lambda base, folder, knows: mlp_speculator(base, folder, False, knows),
    "mlp speculator, tied": lambda base, folder, knows: mlp_speculator(base, folder, True, knows),
}


def speculator_of(path: Path, model: CausalModel) -> Speculator:
    files = SpeculatorFiles.find(path)
    assert files is not None
    return load_speculator(files, model, torch.float32, DEVICE)


def requests() -> list[GenerationRequest]:
    rng = random.Random(4)
    return [
        generation(
            i,
            [rng.randrange(3, 320) for _ in range(rng.randrange(1, 20))],
            NUM_TOKENS,
            sampling(do_sample=i % 2 == 1, temperature=0.7, seed=i),
            ignore_eos=True,
        )
        for i in range(8)
    ]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_texts_are_the_same_and_right_heads_are_followed(
    base: Base, model: CausalModel, tmp_path: Path, case: str, knows: bool
) -> None:
    path = CASES[case](base, tmp_path / "speculator", knows)
    assert locate(ServerOptions(model_id=str(path))) == base.folder
    server = LocalServer(model, speculate=NUM_HEADS, speculator=speculator_of(path, model))
    assert server.run(requests()) == LocalServer(model).run(requests())
    num_drafts = sum(output.is_draft for outputs in server.outputs.values() for output in outputs)
    # Version 2 has the base model's head, which sees the token before and nothing of those behind.
    if knows and (case != "medusa v2" or base.repeats):
        assert num_drafts / (8 * NUM_TOKENS) >= 0.8 * NUM_HEADS / (NUM_HEADS + 1)
        assert all(server.scheduler._drafter._proposals[depth] > 0.8 for depth in range(NUM_HEADS))


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("version", [1, 2])
def test_heads_guess_beside_the_library_of_a_cpu(tmp_path: Path, version: int) -> None:
    """What it computes are the states that heads read."""
    base = Base(tmp_path / "base", repeats=version == 2, head_dim=32)
    path = medusa(base, tmp_path / "speculator", version, knows=True)
    loaded = load_server(ModelFiles.open(base.folder), ServerOptions(model_id=str(path), device="cpu"))
    assert isinstance(loaded.model, HostDecoder) and loaded.speculator is not None
    server = LocalServer(loaded.model, speculate=NUM_HEADS, speculator=loaded.speculator)
    assert server.run(requests()) == LocalServer(loaded.model).run(requests())
    assert all(server.scheduler._drafter._proposals[depth] > 0.8 for depth in range(NUM_HEADS))


def test_a_checkpoint_that_does_not_fit_names_the_tensor(base: Base, model: CausalModel, tmp_path: Path) -> None:
    path = medusa(base, tmp_path / "speculator", 1, knows=False)
    tensors = load_file(path / "medusa_lm_head.safetensors")
    save_file({**tensors, "0.0.linear.bias": torch.zeros(3)}, path / "medusa_lm_head.safetensors")
    with pytest.raises(ModelFileError, match=r"0\.0\.linear\.bias is \[3\]"):
        speculator_of(path, model)
    save_file({**tensors, "9.0.linear.bias": torch.zeros(3)}, path / "medusa_lm_head.safetensors")
    with pytest.raises(ModelFileError, match=r"9\.0\.linear\.bias"):
        speculator_of(path, model)
    (path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"medusa_lm_head\.safetensors is missing"):
        speculator_of(path, model)
