"""What a person can get wrong before the server answers: one line that names it, exit code 1, soon, nothing left."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.common.errors import ModelError
from legato.common.options import ServerOptions
from legato.common.sockets import free_port
from legato.modelfiles.files import ModelFiles
from legato.server.loading import load
from legato.server.model import Model
from tests.integration.client import at_once
from tests.integration.processes import Launched, Outcome, mentioning, run

LIMIT = 5.0
# Nobody listens there: the Hub cannot be reached, whatever the machine's network.
NO_HUB = "http://127.0.0.1:9"


def start_launcher(folder: Path, *arguments: str) -> Outcome:
    words = [f"--port={free_port()}", "--hostname=127.0.0.1", f"--shard-uds-path={folder}/launched", *arguments]
    return run("text-generation-launcher", *words, HF_ENDPOINT=NO_HUB)


def start_server(folder: Path, model: str, *arguments: str) -> Outcome:
    return run("text-generation-server", "serve", model, f"--uds-path={folder}/served", *arguments, HF_ENDPOINT=NO_HUB)


def check_refusal(outcome: Outcome, folder: Path, *words: str) -> None:
    assert outcome.code == 1, outcome.stderr
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1, "more than one line on stderr"
    assert "Traceback" not in outcome.stdout
    for word in words:
        assert word in outcome.stderr
    assert outcome.seconds < LIMIT
    assert mentioning(str(folder)) == [], "a process was left behind"
    assert [*folder.glob("launched*"), *folder.glob("served*")] == [], "a file was left behind"


def check_both(folder: Path, model: str, *words: str, arguments: tuple[str, ...] = ()) -> None:
    """The launcher and a shard on its own say the same; at the same time, because that saves a second."""
    calls = [
        partial(start_launcher, folder, f"--model-id={model}", *arguments),
        partial(start_server, folder, model, *arguments),
    ]
    for outcome in at_once(calls):
        check_refusal(outcome, folder, *words)


# ---- files ----------------------------------------------------------------------------------------------------------


def cut(file: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, size)


def remove(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def write(file: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(text)


def configure(**changes: Any) -> Callable[[Path], None]:
    """Change entries of config.json; None removes one."""

    def damage(folder: Path) -> None:
        config = {**json.loads((folder / "config.json").read_text()), **changes}
        kept = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


def change_weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file)

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("config.json"), ("config.json", "missing")),
        (write("config.json", '{"model_type":'), ("config.json", "not valid JSON")),
        (configure(model_type="mamba2"), ("mamba2", "not supported", "llama")),
        (configure(num_attention_heads=None), ("config.json", "num_attention_heads")),
        (cut("model.safetensors", 500_000), ("model.safetensors", "truncated")),
        (cut("model.safetensors", 100), ("model.safetensors", "truncated")),
        (remove("model.safetensors"), ("no weights",)),
        (change_weights(lambda w: {name: t.to(torch.int8) for name, t in w.items()}), ("torch.int8",)),
        (change_weights(lambda w: {**w, "model.norm.weight": torch.ones(7)}), ("model.norm.weight", "(7,)", "(96,)")),
    ],
    ids=[
        "no-config", "malformed-config", "unknown-type", "missing-key",
        "cut-weights", "cut-header", "no-weights", "integer-weights", "wrong-shape",
    ],
)  # fmt: skip
def test_a_damaged_model_is_named(
    tmp_path: Path, model: Path, damage: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(model, damaged)
    damage(damaged)
    check_both(tmp_path, str(damaged), str(damaged), *words)


@pytest.mark.parametrize(
    "damage",
    [
        configure(hidden_size="wide"),
        configure(hidden_size=[96]),
        configure(hidden_act="wave"),
        configure(num_hidden_layers=2),
        configure(num_hidden_layers=4),
        configure(num_key_value_heads=3),
        configure(model_type=["llama"]),
        configure(rope_parameters="long"),
        configure(rope_parameters={"rope_type": "spiral"}),
        configure(eos_token_id="end"),
        write("generation_config.json", '{"eos_token_id": -1}'),
        write("generation_config.json", "["),
    ],
)
def test_whatever_is_wrong_in_a_configuration_the_model_is_named(
    tmp_path: Path, model: Path, damage: Callable[[Path], object]
) -> None:
    """As above, without the processes: in the order in which a shard starts."""
    damaged = tmp_path / "model"
    shutil.copytree(model, damaged)
    (damaged / "generation_config.json").unlink()
    damage(damaged)
    with pytest.raises(ModelError, match=re.escape(str(damaged))):
        Model(load(ModelFiles.open(damaged), ServerOptions(device="cpu")), ServerOptions())


@pytest.mark.parametrize("size", [10, 200])
def test_a_truncated_gguf_file_is_named(tmp_path: Path, size: int) -> None:
    from gguf import GGUFWriter

    file = tmp_path / "tiny.gguf"
    writer = GGUFWriter(str(file), "llama")
    writer.add_string("general.name", "x" * 300)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.truncate(file, size)
    check_both(tmp_path, str(file), str(file), "truncated")


@pytest.mark.parametrize("damage", [remove("tokenizer.json"), write("tokenizer.json", "{}")])
def test_a_tokenizer_that_is_missing_or_malformed_is_named(
    tmp_path: Path, model: Path, damage: Callable[[Path], object]
) -> None:
    """Only the router needs it at once: a shard speaks token ids."""
    damaged = tmp_path / "model"
    shutil.copytree(model, damaged)
    damage(damaged)
    outcome = start_launcher(tmp_path, f"--model-id={damaged}")
    check_refusal(outcome, tmp_path, str(damaged / "tokenizer.json"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_without_permission_is_named(tmp_path: Path, model: Path, file: str) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / file).chmod(0)
    check_both(tmp_path, str(tmp_path / "model"), file, "Permission denied")


# ---- names and flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_id", ["nobody/has-this", "/no/such/folder", "pypi:no such name"])
def test_a_model_that_does_not_exist_is_named(tmp_path: Path, model_id: str) -> None:
    check_both(tmp_path, model_id, model_id)


def test_a_device_that_is_not_there_is_named(tmp_path: Path, model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the device is there")
    check_both(tmp_path, str(model), "--device cuda", arguments=("--device=cuda",))


def test_a_value_that_is_none_of_the_choices_is_a_usage_error(tmp_path: Path, model: Path) -> None:
    for outcome in (
        start_launcher(tmp_path, f"--model-id={model}", "--dtype=int8"),
        start_server(tmp_path, str(model), "--dtype=int8"),
    ):
        assert outcome.code == 2
        assert "--dtype" in outcome.stderr
        assert "float16" in outcome.stderr
        assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-input-tokens=100", "--max-total-tokens=100"), ("--max-input-tokens (100)", "--max-total-tokens")),
        (("--max-total-tokens=100", "--max-batch-total-tokens=64"), ("--max-batch-total-tokens (64)",)),
        (("--shard-uds-path=/no/such/folder/shard",), ("--shard-uds-path",)),
        (("--shard-uds-path=/tmp/" + "x" * 200,), ("--shard-uds-path",)),
        (("--logger-level=loud",), ("--logger-level", "loud")),
    ],
    ids=["input-total", "total-batch", "no-folder", "long-path", "level"],
)
def test_flags_that_cannot_be_are_named(
    tmp_path: Path, model: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    check_refusal(start_launcher(tmp_path, f"--model-id={model}", *arguments), tmp_path, *words)


# ---- what another server has ----------------------------------------------------------------------------------------


def test_a_port_that_another_server_has_is_named(tmp_path: Path, model: Path, server: Launched) -> None:
    outcome = start_launcher(tmp_path, f"--model-id={model}", f"--port={server.port}")
    check_refusal(outcome, tmp_path, str(server.port), "--port")
    arguments = [f"--tokenizer-name={model}", "--hostname=127.0.0.1", f"--port={server.port}"]
    check_refusal(run("text-generation-router", *arguments), tmp_path, str(server.port), "--port")


def test_a_socket_path_that_another_server_has_is_named_and_that_server_lives_on(
    tmp_path: Path, model: Path, server: Launched
) -> None:
    outcome = start_launcher(tmp_path, f"--model-id={model}", f"--shard-uds-path={server.uds_path}")
    check_refusal(outcome, tmp_path, str(server.uds_path), "--shard-uds-path")
    outcome = start_server(tmp_path, str(model), f"--uds-path={server.uds_path}")
    check_refusal(outcome, tmp_path, str(server.uds_path), "--uds-path")
    assert server.client.get("/health").status == 200


def test_a_file_that_is_no_socket_is_not_replaced_by_one(tmp_path: Path, model: Path) -> None:
    letter = tmp_path / "letter-0"
    letter.write_text("dear")
    outcome = start_server(tmp_path, str(model), f"--uds-path={tmp_path}/letter")
    check_refusal(outcome, tmp_path, str(letter), "not a socket")
    assert letter.read_text() == "dear"
