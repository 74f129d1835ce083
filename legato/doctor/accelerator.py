"""Checks of the GPU driver, torch, Triton and the CPU kernels."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from legato.doctor.findings import Finding, ok, problem, warning

PROBE = [sys.executable, "-m", "legato.doctor.probe"]
# Importing torch and compiling a kernel on a busy machine.
PROBE_SECONDS = 180.0
# Compute capability of the oldest GPU whose kernels are tested.
OLDEST = (7, 5)
CPU_ONLY = "models run on the CPU, slowly"


def look_at_driver() -> Iterator[Finding]:
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if shutil.which("nvidia-smi") is None:
        if devices:
            found = f"{len(devices)} NVIDIA devices in /dev, but no nvidia-smi"
            yield problem("driver", found, "start the container with `--gpus all` (NVIDIA container toolkit)")
        else:
            yield warning("driver", f"no NVIDIA driver: {CPU_ONLY}", "on a machine with a GPU, install NVIDIA's driver")
        return
    query = ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        yield problem("driver", "nvidia-smi does not answer within 30 s", "the driver hangs: reboot the machine")
        return
    if listing.returncode or not listing.stdout.strip():
        said = (listing.stdout + listing.stderr).strip().splitlines() or ["nothing"]
        remedy = "reboot if the driver was updated; in a container, start it with `--gpus all`"
        yield problem("driver", f"nvidia-smi says {said[0]!r}", remedy)
        return
    for line in listing.stdout.strip().splitlines():
        index, name, version, total, used = (part.strip() for part in line.split(","))
        yield ok(f"GPU {index}", f"{name}, {total}, {used} in use, driver {version}")


def run_probe(command: list[str] = PROBE) -> dict[str, Any]:
    """What `probe` prints, or `crash` with the reason."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"crash": f"no answer within {PROBE_SECONDS:.0f} s"}
    try:
        report: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        return {"crash": f"exit code {ran.returncode}: {said}"}
    return report


def look_at_torch(report: dict[str, Any], *, has_driver: bool) -> Iterator[Finding]:
    """`has_driver`: there is a GPU that ought to be used."""
    if "crash" in report:
        remedy = "install Legato in a fresh environment: python3 -m venv .venv && .venv/bin/pip install legato"
        yield problem("torch", f"importing and using it fails ({report['crash']})", remedy)
        return
    version, devices = report["torch"], report["devices"]
    if not has_driver:
        yield ok("torch", f"{version}, computes on the CPU")
    elif report["cuda"] is None:
        remedy = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        yield problem("torch", f"{version} is a build for CPUs, and there is a GPU", remedy)
    elif "cuda_error" in report:
        remedy = f"update NVIDIA's driver to one for CUDA {report['cuda']}, or install torch for an older CUDA"
        yield problem("torch", f"{version} finds no GPU ({report['cuda_error']})", remedy)
    elif not devices:
        yield problem("torch", f"{version} sees no device", "unset CUDA_VISIBLE_DEVICES, or name devices that exist")
    else:
        yield ok("torch", f"{version}, CUDA {report['cuda']}, NCCL {report['nccl']}, {len(devices)} device(s)")
    for index, device in enumerate(devices):
        yield from _look_at_device(f"cuda:{index}", device)


def _look_at_device(subject: str, device: dict[str, Any]) -> Iterator[Finding]:
    capability = tuple(device["capability"])
    if "error" in device:
        remedy = "see who uses it with nvidia-smi; reset it with nvidia-smi --gpu-reset, or reboot"
        yield problem(subject, f"{device['name']} does not add numbers ({device['error']})", remedy)
    elif capability < OLDEST:
        found = f"{device['name']} has compute capability {capability[0]}.{capability[1]}"
        yield warning(subject, f"{found}, older than 7.5", "if a kernel fails, start with --disable-custom-kernels")
    elif device["free_gib"] < 0.5 * device["gib"]:
        found = f"{device['free_gib']} of {device['gib']} GiB are free"
        yield warning(subject, found, "end the processes that nvidia-smi lists, or choose another device")
    else:
        yield ok(subject, f"computes; {device['free_gib']} of {device['gib']} GiB are free")


def look_at_triton(report: dict[str, Any]) -> Iterator[Finding]:
    if "crash" in report:
        return
    if not report["devices"]:
        if "triton" in report:
            yield ok("triton", f"{report['triton']}, not needed on a CPU")
        return
    remedy = "install a C compiler (apt install gcc); --disable-custom-kernels serves without kernels, slowly"
    if "triton_error" in report:
        yield problem("triton", f"cannot be imported ({report['triton_error']})", "pip install triton")
    elif "kernel_error" in report:
        yield problem("triton", f"{report['triton']} does not compile a kernel ({report['kernel_error']})", remedy)
    else:
        yield ok("triton", f"{report['triton']}, compiles and runs a kernel")


def look_at_cpu_kernels(report: dict[str, Any]) -> Iterator[Finding]:
    """Where there is no GPU: with a GPU nothing is computed by them."""
    if "crash" in report or report["devices"]:
        return
    if report["cpu_kernels"] is None:
        remedy = f"install a C compiler (apt install gcc) and run `{sys.executable} -m legato.cpu.build`"
        yield warning("CPU kernels", "not built: torch's int8 products are used, which are slower", remedy)
    else:
        yield ok("CPU kernels", f"{report['cpu_kernels']}, {report['cpu_cores']} threads")
