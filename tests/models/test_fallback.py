"""Architectures without a file: through transformers, with the same answers, or refused with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from legato.common.errors import ModelError, ModelFileError, UnsupportedModel
from legato.common.options import ServerOptions
from legato.layers.kv_cache import KVShape
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.models import foreign, registry
from legato.models.registry import CausalModel, get_model, model_config
from legato.scheduling.state import GenerationRequest
from legato.server.loading import LoadedModel
from legato.server.memory.budget import Reading
from legato.server.memory.capacity import RequestedLimits
from legato.server.model import Model
from tests.models.answers import STEP_TOKENS, Answers, prompts, step_logits
from tests.models.oracle import oracle_logits
from tests.models.test_architectures import check
from tests.models.tiny_seeds import write
from tests.server.local import DEVICE, LocalServer, load
from tests.server.shard import warmup
from tests.tiny_models import greedy_oracle, tiny_llama

SIZES = dict(
    hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=256
)
GROUPED = dict(SIZES, num_key_value_heads=2)
# Scaled logits, partial rotation, squared activations, a window in three of four layers, experts.
SERVED: dict[str, dict[str, Any]] = {
    "granitemoe": dict(GROUPED, num_local_experts=4, num_experts_per_tok=2, logits_scaling=2.0, pad_token_id=0),
    "stablelm": GROUPED,
    "persimmon": SIZES,
    "glm": dict(GROUPED, head_dim=16, pad_token_id=0),
    "exaone4": dict(GROUPED, num_hidden_layers=4, sliding_window=20),
    "olmoe": dict(GROUPED, num_experts=4, num_experts_per_tok=2),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba2": (dict(hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, n_groups=1), "it keeps a state"),
    "lfm2": (dict(GROUPED, layer_types=["conv", "full_attention", "conv"]), "it has layers of the type 'conv'"),
    "gpt_neox_japanese": (
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "its attention implementation cannot be replaced",
    ),
    "bert": (SIZES, "its attention is not causal"),
    "bitnet": (dict(GROUPED, sliding_window=20), "its sliding window is not passed to the attention function"),
}
# What a repository with code of its own looks like: StableLM under another name, which says when it is imported.
OWN_CODE = """
from pathlib import Path
from transformers import StableLmConfig, StableLmForCausalLM
Path(RAN).touch()
class NewConfig(StableLmConfig):
    model_type = "brand_new"
class NewForCausalLM(StableLmForCausalLM):
    config_class = NewConfig
"""


def fallback(folder: Path, **settings: Any) -> CausalModel:
    files = ModelFiles.open(folder)
    trust = dict(trust_remote_code=settings.get("trust_remote_code", False))
    return get_model(files, model_config(files, **trust), torch.float32, DEVICE, **settings)


def answer(model: CausalModel, asked: list[list[int]]) -> Answers:
    server = LocalServer(model, step_tokens=STEP_TOKENS)
    tokens = server.run([GenerationRequest(i, ids, 48, ignore_eos=True) for i, ids in enumerate(asked)])
    whole = [ids + tokens[i] for i, ids in enumerate(asked)]
    logprobs = [[output.logprob for output in server.outputs[i]] for i in range(len(asked))]
    return Answers([tokens[i] for i in range(len(asked))], logprobs, step_logits(model, whole))


@pytest.mark.parametrize("model_type", SERVED)
def test_tokens_and_logits_equal_transformers(model_type: str, tmp_path: Path) -> None:
    folder, asked = write(tmp_path, model_type, SERVED[model_type], {}), prompts(320)
    answers = answer(fallback(folder), asked)
    whole = [prompt + tokens for prompt, tokens in zip(asked, answers.tokens, strict=True)]
    check(asked, answers, oracle_logits(folder, whole))


def test_tokens_equal_those_that_transformers_generates(tmp_path: Path) -> None:
    folder, asked = write(tmp_path, "stablelm", GROUPED, {}), prompts(320)
    assert answer(fallback(folder), asked).tokens == greedy_oracle(folder, asked, 48)


def test_none_of_the_served_types_has_a_file_of_its_own() -> None:
    assert not SERVED.keys() & registry.ARCHITECTURES.keys()


def test_the_cache_is_as_wide_as_the_models_keys(tmp_path: Path) -> None:
    model = fallback(write(tmp_path, "stablelm", GROUPED, {}))
    assert model.kv_shape == KVShape(3, 2, 16, torch.float32)


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[model_type]
    folder = write(tmp_path, model_type, settings, {})
    with pytest.raises(UnsupportedModel, match=f"'{model_type}' is not supported: transformers has it, but {reason}"):
        fallback(folder)


@pytest.mark.parametrize("model_type", ["marian", "mbart", "m2m_100", "blenderbot"])
def test_an_encoder_decoder_is_refused_as_such(model_type: str, tmp_path: Path) -> None:
    """transformers would build the decoders of most of them alone."""
    folder = write(tmp_path, "stablelm", GROUPED, {})
    (folder / "config.json").write_text(json.dumps(dict(model_type=model_type, d_model=32, is_encoder_decoder=True)))
    with pytest.raises(UnsupportedModel, match=f"'{model_type}' is not supported: .*it is an encoder-decoder model"):
        fallback(folder)


def test_a_model_whose_tokens_meet_outside_attention_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not say so: found by what it computes."""
    from transformers.models.stablelm.modeling_stablelm import StableLmMLP

    def leaking(self: Any, x: torch.Tensor) -> torch.Tensor:
        return original(self, x + x.roll(1, dims=1))

    original: Callable[[Any, torch.Tensor], torch.Tensor] = StableLmMLP.forward
    monkeypatch.setattr(StableLmMLP, "forward", leaking)
    with pytest.raises(UnsupportedModel, match="something besides attention mixes tokens"):
        fallback(write(tmp_path, "stablelm", GROUPED, {}))


def test_several_shards_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path, "stablelm", GROUPED, {})
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="use --num-shard 1"):
        fallback(folder, shard=Shard(0, 2))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "stablelm", GROUPED, {})
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"no tensor 'model.layers.1.self_attn.k_proj.weight'"):
        fallback(folder)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path, "stablelm", GROUPED, {})
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        fallback(folder)


@pytest.mark.parametrize("kind", sorted(foreign.STATEFUL_TYPES))
def test_types_that_are_refused_by_name_keep_a_state(kind: str) -> None:
    assert MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[kind]]._is_stateful


def test_a_state_is_also_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "STATEFUL_TYPES", set())
    with pytest.raises(UnsupportedModel, match="it keeps a state"):
        fallback(write(tmp_path, "mamba2", REFUSED["mamba2"][0], {}))


def test_every_type_that_transformers_knows_is_mentioned() -> None:
    mentioned = foreign.Mentioned()
    assert [kind for kind in transformers.CONFIG_MAPPING if kind not in mentioned] == []
    assert "marsupial" not in mentioned


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    folder = write(tmp_path, "nemotron", GROUPED, {})
    (folder / "model.safetensors").unlink()
    logits = step_logits(fallback(folder, dummy=True), [[5, 6, 7]])
    assert logits[0].shape == (3, 320) and logits[0].isfinite().all()


def test_no_memory_is_kept_for_graphs_that_are_never_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose largest step has been measured."""
    monkeypatch.setattr("legato.server.model.measure", lambda *_: Reading(total=1 << 34, free=0, reserved=0, peak=0))

    def room(model: CausalModel, *sizes: int) -> int:
        loaded = LoadedModel(model, ModelFiles.open(tmp_path / "llama"), torch.device("cuda"), torch.float32)
        server = Model(loaded, ServerOptions(cuda_graphs=sizes))
        return server._budget(RequestedLimits(warmup(), max_positions=128, block_size=16, bytes_per_token=64))

    own, through = load(tiny_llama(tmp_path / "llama")), fallback(write(tmp_path / "other", "stablelm", GROUPED, {}))
    assert room(own, 0) > room(own)
    assert room(through, 0) == room(through) == room(own, 0)


def test_without_transformers_the_error_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        return None if name == "transformers" else find_spec(name)

    folder = write(tmp_path, "stablelm", GROUPED, {})
    monkeypatch.setattr("importlib.util.find_spec", missing)
    with pytest.raises(
        UnsupportedModel, match=r"'stablelm' is not supported; supported: .*llama.*legato\[transformers"
    ):
        fallback(folder)


@pytest.mark.parametrize("config", [dict(d_model=64, n_layer=2, ssm_cfg={}), dict(model_type="ssm")])
def test_mamba_in_its_first_format_is_refused_with_the_name_of_the_other(
    config: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="mamba-130m-hf"):
        fallback(folder)


def test_a_type_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new"}))
    with pytest.raises(UnsupportedModel, match="'brand_new' is not supported: transformers does not support it either"):
        fallback(tmp_path)


def write_own_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with code that leaves a file `ran` beside its folder."""
    modules = str(folder.parent / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    write(folder, "stablelm", GROUPED, {})
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "brand_new",
        "auto_map": {"AutoConfig": "own.NewConfig", "AutoModelForCausalLM": "own.NewForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE.replace("RAN", repr(str(folder.parent / "ran"))))
    return folder


@pytest.fixture
def with_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_own_code(tmp_path / "model", monkeypatch)


def test_code_of_the_model_runs_only_for_who_asked_for_it(with_own_code: Path) -> None:
    with pytest.raises(UnsupportedModel, match="--trust-remote-code runs it"):
        fallback(with_own_code)
    assert not (with_own_code.parent / "ran").exists()


def test_code_of_the_model_runs_if_trusted(with_own_code: Path) -> None:
    model = fallback(with_own_code, trust_remote_code=True)
    assert (with_own_code.parent / "ran").exists()
    assert model.config.model_type == "brand_new"


def test_a_known_architecture_never_imports_transformers(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    code = (
        "import sys, torch; from legato.server import service; from legato.modelfiles.files import ModelFiles;"
        "from legato.models.registry import get_model, model_config;"
        f"files = ModelFiles.open(__import__('pathlib').Path({str(folder)!r}));"
        "get_model(files, model_config(files), torch.float32, torch.device('cpu'));"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
