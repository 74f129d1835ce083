"""Both commands as a person runs them, with a shard that they start themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from legato.benchmark.options import BenchmarkOptions, EngineOptions
from legato.benchmark.report import commit
from legato.benchmark.shard import without_drafts
from legato.benchmark.tgi.cli import COMMAND
from legato.cli import bench
from legato.common.program import run_program
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.shapes import SHAPES, write_shape
from tests.benchmark.fake_shard import install

Record = Callable[[], dict[str, Any]]
PYTHON = sys.executable


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Put the fake server where the real one is looked for. Returns what the fake wrote down."""
    monkeypatch.setenv("FAKE_RECORD", f"{tmp_path}/record.json")
    monkeypatch.setattr("sys.executable", str(install(tmp_path)))
    return lambda: dict(json.loads((tmp_path / "record.json").read_text()))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_benchmark_in_one_command(record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--spawn", "some/model", "-b", "1,2", "-b", "3", "-r", "2", f"--json={tmp_path}/figures.json"]
    code = run_program(COMMAND, [*words, "--", "--dtype=float16"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "| Model              | some/model |" in captured.out
    assert [line.partition(":")[0] for line in captured.err.splitlines()] == [
        "batch size 1", "batch size 2", "batch size 3",
    ]  # fmt: skip
    assert [result["batch_size"] for result in json.loads((tmp_path / "figures.json").read_text())["results"]] == [
        1,
        2,
        3,
    ]
    assert record()["words"][:2] == ["serve", "some/model"] and record()["words"][-1] == "--dtype=float16"
    assert not is_running(record()["pid"])


def test_the_engine_in_one_command(record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["engine", "--requests=3", "--prompt=5", "--new=4", "--repeat=2", "--max-total-tokens=64"]
    code = run_program(bench, [*words, f"--json={tmp_path}/figures.json", "--", "--device=cpu"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out.splitlines()[2].split("|")[1:5] == [" custom   ", "        3 ", " 15 ", "  12 "]
    data = json.loads((tmp_path / "figures.json").read_text())
    assert len(data["workloads"]["custom"]["runs"]) == 2
    assert data["machine"]["torch"] and data["date"]
    assert record()["words"][0] == "serve" and record()["words"][-1] == "--device=cpu"
    assert "--speculate=0" in record()["words"] and data["shard"]["speculate"] == 0
    assert not is_running(record()["pid"])


def test_engines_are_compared_without_drafts_unless_they_are_asked_for() -> None:
    assert without_drafts(["--device=cpu"]) == ["--speculate=0", "--device=cpu"]
    for words in (["--speculate", "4"], ["--speculate=4"], ["--speculate-model=m"]):
        assert without_drafts(words) == words


def test_a_shape_is_served_with_dummy_weights(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(bench, ["engine", "--model=tiny", "--requests=1", "--prompt=2", "--new=1", "--repeat=1"]) == 0
    words = record()["words"]
    assert words[1].endswith("/tiny") and words[2] == "--load-format=dummy"
    assert not Path(words[1]).exists()


@pytest.mark.parametrize("words", [["--spawn=some/model"], ["engine", "--model=some/model"]])
def test_a_shard_that_dies_has_the_last_word(
    record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setenv("FAKE_SHARD", "die")
    assert run_program(bench if words[0] == "engine" else COMMAND, words) == 1
    assert capsys.readouterr().err == (
        "error: the shard ended with code 3; its last lines:\n  loading\n  error: the weights are upside down\n"
    )


# The shard is looked for beside the interpreter.
RUN = "import sys; sys.executable = sys.argv.pop(1); from legato.benchmark.tgi.cli import main; main()"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_shows_what_it_has_and_leaves_nothing_behind(
    record: Record, number: signal.Signals
) -> None:
    words = ["--spawn=some/model", "--batch-size=1,2", "--decode-length=200", "--runs=10"]
    process = subprocess.Popen([PYTHON, "-c", RUN, sys.executable, *words], stdout=PIPE, stderr=PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("batch size 1")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, "")
    assert "| Prefill        |          1 |" in out
    assert not is_running(record()["pid"])


@pytest.mark.parametrize(
    ("command", "words", "complaint"),
    [
        (COMMAND, ["--", "--device=cpu"], "give --spawn MODEL as well"),
        (COMMAND, ["--json=/nowhere/r.json"], "--json /nowhere/r.json"),
        (bench, ["engine", "--socket=/s", "--model=tiny"], "--model starts a shard"),
        (bench, ["engine", "--socket=/s", "--", "--device=cpu"], "leave out --socket"),
        (bench, ["engine", "--workload=G1", "--new=3"], "leave out --workload"),
        (bench, ["engine", "--workload=G1,G7"], "--workload G7"),
    ],
)
def test_contradictory_options_are_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], command: Any, words: list[str], complaint: str
) -> None:
    assert run_program(command, words) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_the_folder_of_a_model(name: str, tmp_path: Path) -> None:
    files = ModelFiles.open(write_shape(name, tmp_path))
    config = files.config()
    assert config["vocab_size"] > files.tokenizer().get_vocab_size() - 1
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert files.eos_token_ids() == [config["eos_token_id"]]


@pytest.mark.parametrize("name", SHAPES)
def test_help_and_documentation_name_every_shape(name: str) -> None:
    document = Path(__file__).parents[2] / "docs" / "benchmark.md"
    assert f"| `{name}` |" in document.read_text()
    for options, field in ((BenchmarkOptions, "spawn"), (EngineOptions, "model")):
        (found,) = [each for each in fields(options) if each.name == field]
        assert f"`{name}`" in str(found.metadata)


def test_the_tokenizer_of_a_shape_gives_back_any_text(tmp_path: Path) -> None:
    tokenizer = ModelFiles.open(write_shape("tiny", tmp_path)).tokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve 🙂\n").ids) == "naïve 🙂\n"


def test_the_commit_is_that_of_our_code_and_says_if_it_was_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git("init", "-q")
    assert commit(package) is None, "not tracked: installed inside somebody's checkout"
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert commit(package) == {"id": git("rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("x = 1")
    assert commit(package) == {"id": git("rev-parse", "HEAD"), "dirty": True}
