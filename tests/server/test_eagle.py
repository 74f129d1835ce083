"""EAGLE-3 heads in their published layout: they change no text, and are followed where they are right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.common.errors import ModelError, OptionError
from legato.common.options import ServerOptions
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.speculator import SpeculatorFiles
from legato.models.decoder import Decoder
from legato.models.eagle import Eagle3Head, load_eagle3
from legato.server.loading import load as load_server
from legato.server.speculation.guessers import EagleGuesser
from tests.server.local import DEVICE, LocalServer, load
from tests.server.test_speculators import NUM_TOKENS, Base, requests

NUM_DRAFTS = 3
# The head knows the tokens from here on.
FIRST_TOKEN = 20
HEADS, KV_HEADS, HEAD_DIM, INNER = 6, 2, 16, 64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("base"))


def decoder(base: Base) -> Decoder:
    model = load(base.folder)
    assert isinstance(model, Decoder)
    return model


def write_head(base: Base, folder: Path, *, knows: bool, layer: str = "midlayer", **changes: Any) -> Path:
    """One that knows looks at the token alone: queries find their own keys, and nothing of the states is left."""
    size, generator = base.size, torch.Generator().manual_seed(6)
    draft_vocab = base.vocab_size - FIRST_TOKEN

    def random_matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * size**-0.5

    keys = torch.cat((random_matrix(KV_HEADS * HEAD_DIM, size), torch.zeros(KV_HEADS * HEAD_DIM, size)), 1)
    queries = keys.view(KV_HEADS, 1, HEAD_DIM, -1).expand(-1, HEADS // KV_HEADS, -1, -1).reshape(HEADS * HEAD_DIM, -1)
    values = torch.cat((random_matrix(KV_HEADS * HEAD_DIM, size), torch.zeros(KV_HEADS * HEAD_DIM, size)), 1)
    if not knows:
        keys, queries, values = (random_matrix(*each.shape) for each in (keys, queries, values))
    tensors = {
        f"{layer}.self_attn.q_proj.weight": 6.0 * queries,
        f"{layer}.self_attn.k_proj.weight": keys,
        f"{layer}.self_attn.v_proj.weight": values,
        f"{layer}.self_attn.o_proj.weight": random_matrix(size, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": random_matrix(INNER, size),
        f"{layer}.mlp.up_proj.weight": random_matrix(INNER, size),
        f"{layer}.mlp.down_proj.weight": (0.0 if knows else 1.0) * random_matrix(size, INNER),
        f"{layer}.input_layernorm.weight": torch.ones(size),
        f"{layer}.hidden_norm.weight": torch.zeros(size) if knows else torch.ones(size),
        f"{layer}.post_attention_layernorm.weight": torch.ones(size),
        "norm.weight": torch.ones(size),
        "fc.weight": random_matrix(size, 3 * size),
        "lm_head.weight": random_matrix(draft_vocab, size),
        "d2t": torch.full((draft_vocab,), FIRST_TOKEN),
        "t2d": torch.arange(base.vocab_size) >= FIRST_TOKEN,
    }
    if knows:
        tensors["lm_head.weight"] = _states(base, tensors, layer)[base.before[FIRST_TOKEN:]]
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size, "vocab_size": 320,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1,
        "intermediate_size": INNER, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "draft_vocab_size": draft_vocab, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def _states(base: Base, tensors: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """What the head that knows makes of each token, if its attention is on that token alone."""
    normed = torch.nn.functional.rms_norm(base.embeddings, (base.size,))
    values = normed @ tensors[f"{layer}.self_attn.v_proj.weight"][:, : base.size].T
    heads = values.view(-1, KV_HEADS, 1, HEAD_DIM).expand(-1, -1, HEADS // KV_HEADS, -1).reshape(len(values), -1)
    states = torch.nn.functional.rms_norm(heads @ tensors[f"{layer}.self_attn.o_proj.weight"].T, (base.size,))
    return torch.nn.functional.normalize(states, dim=1)


def head_of(path: Path, model: Decoder) -> Eagle3Head:
    files = SpeculatorFiles.find(path)
    assert files is not None and files.kind == "eagle3"
    return load_eagle3(files, model, torch.float32, DEVICE)


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
@pytest.mark.parametrize("knows", [True, False])
def test_texts_are_the_same_and_a_right_head_is_followed(base: Base, tmp_path: Path, knows: bool, layer: str) -> None:
    path, model = write_head(base, tmp_path / "head", knows=knows, layer=layer), decoder(base)
    expected = LocalServer(decoder(base)).run(requests())
    server = LocalServer(model, speculate=NUM_DRAFTS, draft=EagleGuesser(head_of(path, model), model))
    assert server.run(requests(), random.Random(2)) == expected
    if knows:
        num_drafts = sum(output.is_draft for outputs in server.outputs.values() for output in outputs)
        assert num_drafts / (8 * NUM_TOKENS) >= 0.6 * NUM_DRAFTS / (NUM_DRAFTS + 1)
        assert all(server.scheduler._drafter._proposals[depth] > 0.75 for depth in range(NUM_DRAFTS))


def test_what_the_head_makes_of_a_text_does_not_depend_on_how_it_was_read(base: Base, tmp_path: Path) -> None:
    """All at once, or in chunks of a prompt with others in between: the guesses are the same."""
    path = write_head(base, tmp_path / "head", knows=False)
    guesses = []
    for step_tokens in (512, 24):
        model = decoder(base)
        server = LocalServer(
            model, speculate=NUM_DRAFTS, draft=EagleGuesser(head_of(path, model), model), step_tokens=step_tokens
        )
        server.run(requests()[:1])
        assert server.engine.draft_model is not None
        guesses.append(server.engine.draft_model._state[0].guesses)
    assert guesses[0] == guesses[1]


def test_a_head_is_given_beside_its_base_model(base: Base, tmp_path: Path) -> None:
    path = write_head(base, tmp_path / "head", knows=False)
    files = ModelFiles.open(base.folder)
    loaded = load_server(files, ServerOptions(model_id=str(base.folder), speculate_model=str(path)))
    assert isinstance(loaded.draft, EagleGuesser)
    with pytest.raises(OptionError, match="at most 16 tokens"):
        load_server(files, ServerOptions(model_id=str(base.folder), speculate_model=str(path), speculate=17))


@pytest.mark.parametrize(
    ("changes", "missing", "problem"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "", r"eagle_aux_hidden_state_layer_ids is \[0, 1, 9\]"),
        ({}, "fc.weight", "fc.weight is missing"),
        ({"num_hidden_layers": 2}, "", "2 layers"),
    ],
)
def test_a_head_that_does_not_fit_says_why(
    base: Base, tmp_path: Path, changes: dict[str, Any], missing: str, problem: str
) -> None:
    path = write_head(base, tmp_path / "head", knows=False, **changes)
    tensors = load_file(path / "model.safetensors")
    tensors.pop(missing, None)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=problem):
        head_of(path, decoder(base))
