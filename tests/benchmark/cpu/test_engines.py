"""Engines are found, started, asked and stopped; a peer that is missing or fails is left out and named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from legato.benchmark.cpu.engines import ENGINES, EngineCommand, EngineFailed, EngineMissing, started
from legato.benchmark.cpu.models import CpuModel
from legato.benchmark.cpu.process_tree import processes, tree_bytes
from legato.benchmark.cpu.surroundings import CpuLimit, cpu_limit
from legato.benchmark.cpu.work import WORKLOADS
from legato.cli import main
from legato.common.errors import OptionError
from legato.modelfiles.shapes import write_shape
from legato.models.gguf_source import GgufSource

# Answers as OpenVINO's program does: every token of every request a millisecond after the one before.
PIPE = """
import json, sys
greeting = json.loads(sys.stdin.readline())
print(json.dumps({"version": greeting["model"]}), flush=True)
for line in sys.stdin:
    run = json.loads(line)
    times = [[0.05 + 0.001 * i for i in range(run["new_tokens"])] for _ in run["prompts"]]
    print(json.dumps({"seconds": 1.5, "times": times}), flush=True)
"""
# As much of a launcher as `legato bench cpu` needs, with answers of the wrong length.
SHORT_ANSWERS = """
import json, os, sys
sys.stdin.readline()
print("{}", flush=True)
for line in sys.stdin:
    print(json.dumps({"seconds": 1.0, "times": [[0.1]]}), flush=True)
"""


def test_a_program_is_asked_over_its_pipes() -> None:
    command = EngineCommand([sys.executable, "-c", PIPE], greeting={"model": "m"})
    workload = WORKLOADS["W1"]
    with started(command, CpuLimit()) as engine:
        engine.wait_until_ready()
        records, seconds = engine.run(workload, workload.prompts(range(10), 1))
        assert engine.memory_bytes > 10**6
    assert seconds == 1.5 and len(records) == workload.num_requests
    assert records[0].ttft == 0.05 and records[0].num_tokens == workload.new_tokens
    assert records[0].mean_gap == pytest.approx(0.001)
    assert engine.process.returncode is not None


def test_one_that_dies_is_described_by_its_last_lines() -> None:
    command = EngineCommand([sys.executable, "-c", "import sys; sys.exit('no such model')"], greeting={"model": "m"})
    with started(command, CpuLimit()) as engine, pytest.raises(EngineFailed, match="code 1\n  no such model"):
        engine.wait_until_ready()


def test_peers_that_are_not_installed_are_named_with_the_cure(tmp_path: Path) -> None:
    model = CpuModel(str(write_shape("tiny", tmp_path / "tiny")), tmp_path)
    for name in ("openvino", "vllm"):
        with pytest.raises(EngineMissing, match="make bench-peers"):
            ENGINES[name](model, tmp_path, ())


def test_llama_cpp_is_not_asked_to_read_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "bin" / "llama-server"
    server.parent.mkdir()
    server.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(server.parent))
    model = CpuModel(str(write_shape("tiny", tmp_path / "tiny")), tmp_path)
    with pytest.raises(EngineMissing, match="reads only GGUF"):
        ENGINES["llama.cpp"](model, tmp_path, ())


def test_a_limit_is_a_cgroup_or_whole_cores() -> None:
    with cpu_limit(0.5) as limit:
        words = limit.wrap(["true"])
        if limit.procs is None:
            assert words == ["true"] and len(limit.cores) == 1 and "rounded up" in limit.words
        else:
            assert limit.procs.exists() and words[-1] == "true" and limit.words == "0.5 CPUs by cgroup"
    assert limit.procs is None or not limit.procs.exists()


def test_more_cpus_than_there_are_is_refused() -> None:
    with pytest.raises(OptionError, match="--cpus 4096"), cpu_limit(4096):
        pass


def test_a_tree_has_its_root_and_memory() -> None:
    assert processes(os.getpid())[0] == os.getpid()
    assert tree_bytes(os.getpid()) > 10**6


def test_the_command_compares_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Legato for real, with a fake shard whose tokens are far enough apart to time them; one peer that does other work
    than it was given, and one that is missing."""
    monkeypatch.setitem(
        ENGINES,
        "openvino",
        lambda model, peers, words: EngineCommand([sys.executable, "-c", SHORT_ANSWERS], greeting={"model": "m"}),
    )
    monkeypatch.setitem(
        ENGINES,
        "llama.cpp",
        lambda model, peers, words: EngineCommand([sys.executable, "-c", PIPE], greeting={"model": "m"}),
    )
    out = tmp_path / "out.json"
    model = write_shape("tiny", tmp_path / "tiny")
    words = ["bench", "cpu", f"--model={model}", f"--peers={tmp_path}", "--scale=16", "--repeat=1", f"--json={out}"]
    monkeypatch.setattr(sys, "argv", ["legato", *words, "--neighbour=19", "--", "--fake", "--fake-step-ms=20"])
    with pytest.raises(SystemExit, match="0"):
        main()
    printed = capsys.readouterr().out
    assert "legato is … times as fast as" in printed and "Not measured: vllm: not in" in printed
    assert "Neighbour: one busy process, nice 19" in printed
    report = json.loads(out.read_text())
    assert set(report["engines"]) == {"legato", "llama.cpp"}
    assert "1 tokens instead of" in report["left_out"]["openvino"]
    assert report["engines"]["legato"]["runs"]["W4"][0]["num_tokens"] == 4  # two requests of two
    assert set(report["engines"]["legato"]["runs"]) == {"W1", "W2", "W3", "W4"}
    assert report["engines"]["legato"]["final_mb"] > 20
    assert "--speculate=0" in report["engines"]["legato"]["command"]
    assert report["ratios"]["W1 ms per token"]["best_peer"] == "llama.cpp"


def test_random_weights_are_a_gguf_file_that_legato_reads(tmp_path: Path) -> None:
    model = CpuModel("tiny", tmp_path)
    assert model.gguf is not None and model.files.config()["num_hidden_layers"] == 2
    assert model.files.tokenizer().get_vocab_size() == 512
    source = GgufSource(model.gguf)
    values = source.read("model.layers.1.mlp.down_proj.weight", ())
    assert values.shape == (64, 128) and values.std() > 0 and values.abs().max() < 0.1
    dense = model.dense_folder()
    assert (dense / "model.safetensors").exists() and json.loads((dense / "config.json").read_text())[
        "vocab_size"
    ] == 512
