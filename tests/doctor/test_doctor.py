"""What `legato doctor` says of machines in several states of disrepair, and what it advises."""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from legato.cli import legato
from legato.common.program import run_program
from legato.doctor import accelerator, machine
from legato.doctor.findings import Finding, examined
from legato.doctor.model import look_at_model
from legato.plan.cli import PlanOptions
from tests.tiny_models import tiny_llama

GIB = 2**30
CARD = {"name": "H200", "capability": [9, 0], "gib": 139.8, "free_gib": 138.0, "sum": 8.0}
GPU_REPORT = {"torch": "2.13.0", "cuda": "12.8", "nccl": "2.27.5", "devices": [CARD], "triton": "3.6.0", "kernel": 0.7}


def only(findings: Any) -> Finding:
    (finding,) = findings
    return finding


def by_subject(findings: Any) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


# ---- the accelerator ------------------------------------------------------------------------------------------------


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_machine_without_a_driver_is_told_that_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    finding = only(accelerator.look_at_driver())
    assert finding.verdict == "warning" and "CPU" in finding.found


def test_every_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo '0, NVIDIA H200, 570.86, 143771 MiB, 4 MiB'")
    finding = only(accelerator.look_at_driver())
    assert finding == Finding("GPU 0", "ok", "NVIDIA H200, 143771 MiB, 4 MiB in use, driver 570.86")


def test_a_driver_that_was_updated_under_a_running_kernel_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    finding = only(accelerator.look_at_driver())
    assert finding.verdict == "problem" and "version mismatch" in finding.found and "reboot" in finding.remedy


@pytest.mark.parametrize(
    ("changes", "subject", "verdict", "words"),
    [
        ({}, "torch", "ok", "1 device(s)"),
        ({"cuda": None, "devices": []}, "torch", "problem", "build for CPUs"),
        ({"cuda_error": "RuntimeError: driver too old", "devices": []}, "torch", "problem", "driver too old"),
        ({"devices": []}, "torch", "problem", "sees no device"),
        ({}, "cuda:0", "ok", "138.0 of 139.8 GiB are free"),
        ({"devices": [CARD | {"free_gib": 20.0}]}, "cuda:0", "warning", "20.0 of 139.8 GiB"),
        ({"devices": [CARD | {"capability": [7, 0]}]}, "cuda:0", "warning", "7.0"),
        ({"devices": [CARD | {"error": "ECC error"}]}, "cuda:0", "problem", "ECC error"),
    ],
)
def test_torch_is_compared_with_the_machine(changes: dict[str, Any], subject: str, verdict: str, words: str) -> None:
    finding = by_subject(accelerator.look_at_torch(GPU_REPORT | changes, has_driver=True))[subject]
    assert finding.verdict == verdict and words in finding.found


def test_a_torch_that_crashes_is_reported_and_not_shared() -> None:
    report = accelerator.run_probe([sys.executable, "-c", "import os; os.abort()"])
    finding = only(accelerator.look_at_torch(report, has_driver=False))
    assert finding.verdict == "problem" and "exit code -6" in finding.found
    assert list(accelerator.look_at_triton(report)) == []


@pytest.mark.parametrize(
    ("changes", "verdict", "remedy"),
    [
        ({}, "ok", ""),
        ({"triton_error": "ImportError"}, "problem", "pip install triton"),
        ({"kernel_error": "RuntimeError: Failed to find C compiler"}, "problem", "C compiler"),
    ],
)
def test_triton_must_compile_where_there_is_a_gpu(changes: dict[str, Any], verdict: str, remedy: str) -> None:
    finding = only(accelerator.look_at_triton(GPU_REPORT | changes))
    assert finding.verdict == verdict and remedy in finding.remedy


@pytest.mark.parametrize(
    ("kernels", "verdict", "words"),
    [("avx512-vnni", "ok", "avx512-vnni, 2 threads"), (None, "warning", "slower")],
)
def test_cpu_kernels_are_looked_at_where_there_is_no_gpu(kernels: str | None, verdict: str, words: str) -> None:
    report = {"devices": [], "cpu_kernels": kernels, "cpu_cores": 2}
    finding = only(accelerator.look_at_cpu_kernels(report))
    assert finding.verdict == verdict and words in finding.found
    assert ("legato.cpu.build" in finding.remedy) == (verdict == "warning")
    assert list(accelerator.look_at_cpu_kernels(report | {"devices": [CARD]})) == []


# ---- the machine ----------------------------------------------------------------------------------------------------


def test_packages_are_compared_with_what_legato_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(machine.look_at_packages()).verdict == "ok"
    installed = machine.metadata.version
    monkeypatch.setattr(machine.metadata, "version", lambda name: "1.0" if name == "torch" else installed(name))
    finding = only(machine.look_at_packages())
    assert finding.verdict == "problem" and "torch is 1.0, needed is >=2.11" in finding.found


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CGROUP_LIMIT": 3 * GIB, "CGROUP_USED": GIB}.items():
        (tmp_path / name).write_text(str(value))
        monkeypatch.setattr(machine, name, tmp_path / name)
    assert machine.available_memory() == 2 * GIB
    assert by_subject(machine.look_at_memory(0))["memory"].verdict == "warning"


def test_docker_s_shared_memory_is_too_small_for_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    assert "--shm-size" in by_subject(machine.look_at_memory(2))["shared memory"].remedy
    assert "shared memory" not in by_subject(machine.look_at_memory(1))


def test_a_full_disk_is_named_with_the_variable_that_moves_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "not" / "yet"))
    assert by_subject(machine.look_at_disks())["package cache"].found.startswith(str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(machine, "LEAST_DISK", 1 << 60)
    assert "LEGATO_CACHE" in by_subject(machine.look_at_disks())["package cache"].remedy


def test_a_port_in_use_is_a_problem() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = only(machine.look_at_ports("127.0.0.1", {"--port": port}))
    assert finding.verdict == "problem" and finding.subject == f"port {port}" and "--port" in finding.remedy


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    finding = next(machine.look_at_limits())
    assert finding.verdict == "warning" and "256 open files" in finding.found and "ulimit -n 4096" in finding.remedy


def test_a_part_that_cannot_be_examined_is_a_finding_of_its_own() -> None:
    def look() -> Any:
        raise OSError("no /proc")

    assert "no /proc" in only(examined("memory", look)).found


# ---- the model ------------------------------------------------------------------------------------------------------


def looked_at(folder: Path, room: int = GIB) -> dict[str, Finding]:
    return by_subject(look_at_model(PlanOptions(model_id=str(folder)), room, "main memory"))


def test_a_whole_model_is_described(tmp_path: Path) -> None:
    findings = looked_at(tiny_llama(tmp_path))
    assert findings["model"].verdict == findings["model_type"].verdict == findings["room"].verdict == "ok"
    assert "320 tokens" in findings["model"].found
    assert "/generate" in findings["chat template"].remedy


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = tiny_llama(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    finding = looked_at(tmp_path)["model"]
    assert finding.verdict == "problem" and "model.safetensors" in finding.found


def test_a_model_that_does_not_fit_is_sent_to_legato_plan(tmp_path: Path) -> None:
    finding = looked_at(tiny_llama(tmp_path), room=1000)["room"]
    assert finding.verdict == "problem" and "legato plan" in finding.remedy


def test_a_model_that_is_not_here_yet_is_no_problem() -> None:
    options = PlanOptions(model_id="organisation/never-downloaded")
    finding = only(look_at_model(options, GIB, "main memory"))
    assert finding.verdict == "warning" and "download-weights organisation/never-downloaded" in finding.remedy


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (dict(model_type="mamba2"), "keeps a state"),
        (dict(model_type="marian", is_encoder_decoder=True), "encoder-decoder"),
        (dict(model_type="nobodys"), "transformers does not support it either"),
    ],
)
def test_a_type_that_would_be_refused_is_a_problem(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    file = tiny_llama(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    finding = looked_at(tmp_path)["model_type"]
    assert finding.verdict == "problem" and found in finding.found and "Supported" not in finding.found


def test_a_type_that_runs_through_transformers_is_a_warning(tmp_path: Path) -> None:
    file = tiny_llama(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(model_type="stablelm")))
    assert looked_at(tmp_path)["model_type"].verdict == "warning"


def test_a_folder_that_does_not_exist_needs_another_name(tmp_path: Path) -> None:
    finding = looked_at(tmp_path / "nowhere")["model"]
    assert finding.verdict == "problem" and "exists" in finding.remedy


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_looks_at_everything_and_fails_with_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.dumps({"torch": "2.13.0", "cuda": None, "devices": [], "cpu_kernels": None, "cpu_cores": 2})
    monkeypatch.setattr(accelerator.run_probe, "__defaults__", ([sys.executable, "-c", f"print({report!r})"],))
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["doctor", str(tmp_path), "--hostname=127.0.0.1", f"--port={port}", "--prometheus-port=0", "--json"]
        assert run_program(legato, words) == 1
    findings = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"python", "packages", "torch", "CPU kernels", "memory", "Hub cache", "limits", "model"} <= set(findings)
    assert findings[f"port {port}"]["verdict"] == findings["model"]["verdict"] == "problem"


def test_the_probe_computes() -> None:
    report = accelerator.run_probe()
    assert report["sum"] == 8.0 and report["torch"] and report["cpu_cores"] >= 1 and "cpu_kernels" in report
