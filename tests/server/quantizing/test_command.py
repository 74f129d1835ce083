"""`text-generation-server quantize`: the model that it writes is loaded and close to the original."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from legato.common.errors import OptionError, UnsupportedModel
from legato.common.program import command
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.registry import get_model
from legato.server.quantizing import calibration
from legato.server.quantizing import command as quantize
from legato.server.quantizing.options import QuantizeOptions
from tests.models.answers import step_logits
from tests.models.test_gguf_families import convert
from tests.models.tiny_experts import tiny_mixtral
from tests.models.tiny_hybrid import tiny_qwen3_next
from tests.models.tiny_mamba import tiny_mamba
from tests.models.tiny_seeds import tiny_gpt2
from tests.models.tiny_t5 import tiny_t5
from tests.quantization.checkpoints import base_model
from tests.tiny_models import write_tokenizer

WORDS = "GPTQ quantizes a matrix column by column and lets the columns behind it make up for what rounding changed. "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    file.write_text("".join(f"{i} {WORDS}" for i in range(60)))
    return file


def run(*words: str) -> None:
    answer = CliRunner().invoke(command(QuantizeOptions, quantize.run, "quantize", ""), words, standalone_mode=False)
    if answer.exception is not None:
        raise answer.exception


def logits(folder: Path) -> torch.Tensor:
    """Of text that is like that of the calibration."""
    files = ModelFiles.open(folder)
    ids = files.tokenizer().encode(f"77 {WORDS}").ids
    model = get_model(files, ModelConfig.from_hf(files.config()), torch.float32, torch.device("cpu"))
    return torch.cat(step_logits(model, [ids[:60], ids[40:90]]))


def distance(one: Path, other: Path) -> float:
    """Mean squared difference of the logits, in their variance."""
    ours, theirs = logits(one), logits(other)
    return float((ours - theirs).square().mean() / theirs.var())


# Tiny random models have nothing to lose: errors are far larger than those of trained ones.
CASES: dict[str, tuple[Callable[..., Path], list[str], float]] = {
    "llama-8-bit": (base_model, ["--bits=8", "--group-size=64"], 1e-3),
    "llama-4-bit": (base_model, ["--group-size=64"], 0.1),
    "llama-act-order": (base_model, ["--group-size=32", "--act-order"], 0.1),
    "llama-3-bit": (base_model, ["--bits=3", "--group-size=32"], 0.4),
    "llama-one-group": (base_model, ["--group-size=-1", "--sym"], 0.2),
    "gpt2": (tiny_gpt2, ["--bits=8", "--group-size=-1"], 0.02),
    "mamba": (partial(tiny_mamba, time_step_rank=8), ["--bits=8", "--group-size=-1"], 0.02),
    "mixtral": (tiny_mixtral, ["--bits=8", "--group-size=-1"], 0.02),
    "qwen3-next": (tiny_qwen3_next, ["--bits=8", "--group-size=-1"], 0.02),
}


@pytest.mark.parametrize("case", CASES)
def test_the_quantized_model_is_close_to_the_original(case: str, tmp_path: Path, text: Path) -> None:
    make, options, bound = CASES[case]
    make(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    out = tmp_path / "quantized"
    run(str(tmp_path / "model"), str(out), "--calibration", str(text), "--calibration-length=64", *options)
    assert 0 < distance(out, tmp_path / "model") < bound
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "gptq"
    tensors = load_file(out / "model.safetensors")
    assert any(name.endswith(".qweight") for name in tensors)
    assert (out / "tokenizer.json").exists()


def test_calibration_is_better_than_rounding(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_model(tmp_path / "model")
    words = ["--calibration", str(text), "--calibration-length=64", "--bits=4", "--group-size=64"]
    run(str(tmp_path / "model"), str(tmp_path / "gptq"), *words)
    monkeypatch.setattr("legato.quantization.gptq.Hessian.add", lambda self, x, dense=None: None)
    run(str(tmp_path / "model"), str(tmp_path / "rounded"), *words)
    assert distance(tmp_path / "gptq", tmp_path / "model") < distance(tmp_path / "rounded", tmp_path / "model")


def test_a_gguf_file_becomes_a_folder(tmp_path: Path, text: Path) -> None:
    base_model(tmp_path / "model")
    file = convert(tmp_path / "model", "llama", tmp_path / "model.gguf")
    run(str(file), str(tmp_path / "out"), "--calibration", str(text), "--bits=8", "--group-size=64")
    assert distance(tmp_path / "out", file) < 1e-3


def test_several_files_have_an_index(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "FILE_BYTES", 100_000)
    base_model(tmp_path / "model")
    out = tmp_path / "out"
    run(str(tmp_path / "model"), str(out), "--calibration", str(text), "--bits=8", "--group-size=64")
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert distance(out, tmp_path / "model") < 1e-3


def test_only_one_layer_is_in_memory(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_model(tmp_path / "model")
    held: list[int] = []
    original = calibration.CalibratedWeight.load

    def load(self: calibration.CalibratedWeight) -> None:
        original(self)
        alive[id(self)] = self
        held.append(sum(weight._product is not None for weight in alive.values()))

    alive: dict[int, calibration.CalibratedWeight] = {}
    monkeypatch.setattr(calibration.CalibratedWeight, "load", load)
    run(str(tmp_path / "model"), str(tmp_path / "out"), "--calibration", str(text), "--bits=8", "--group-size=64")
    assert max(held) == 4 and len(alive) == 8


def test_mistakes_are_found_before_the_work(tmp_path: Path, text: Path) -> None:
    folder = base_model(tmp_path / "model")
    words = [str(folder), str(tmp_path / "out")]
    with pytest.raises(OptionError, match="--calibration is required"):
        run(*words)
    with pytest.raises(OptionError, match=r"--calibration .*missing\.txt"):
        run(*words, "--calibration", str(tmp_path / "missing.txt"))
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(OptionError, match=r"short\.txt has 5 tokens; at least 512 are needed"):
        run(*words, "--calibration", str(tmp_path / "short.txt"))
    with pytest.raises(OptionError, match=r"--group-size 256 does not divide the 128 inputs of .*q_proj; choose 128"):
        run(*words, "--calibration", str(text), "--group-size=256")
    with pytest.raises(OptionError, match="--calibration-length 513 exceeds the 512 positions of the model"):
        run(*words, "--calibration", str(text), "--calibration-length=513")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "something").touch()
    with pytest.raises(OptionError, match="out is not empty"):
        run(*words, "--calibration", str(text))
    with pytest.raises(OptionError, match="OUTPUT_DIR is missing"):
        run(str(folder), "--calibration", str(text))


def test_what_cannot_be_quantized_says_so(tmp_path: Path, text: Path) -> None:
    tiny_t5(tmp_path / "t5")
    write_tokenizer(tmp_path / "t5")
    with pytest.raises(UnsupportedModel, match="'t5' is not a decoder; quantize it on load"):
        run(str(tmp_path / "t5"), str(tmp_path / "out"), "--calibration", str(text))
    base_model(tmp_path / "model")
    options = ["--calibration", str(text), "--group-size=64"]
    run(str(tmp_path / "model"), str(tmp_path / "once"), *options)
    with pytest.raises(UnsupportedModel, match="is already quantized"):
        run(str(tmp_path / "once"), str(tmp_path / "twice"), *options)
