"""`legato doctor [MODEL]`: checks the machine and a model's files, and says how to fix what it finds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from rich.console import Console
from rich.text import Text

from legato.common.option import option
from legato.common.options import ModelOptions
from legato.common.program import command
from legato.doctor import accelerator, machine
from legato.doctor.findings import Finding, Verdict, examined
from legato.doctor.model import look_at_model
from legato.launcher.sizing import listen_address
from legato.plan.cli import PlanOptions

GIB = 2**30
MARKS: dict[Verdict, tuple[str, str]] = {"ok": ("ok", "green"), "warning": ("!", "yellow"), "problem": ("X", "red")}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(ModelOptions):
    """What to check"""

    changes: ClassVar[dict[str, dict[str, Any]]] = {"model_id": {"positional": True}}

    hostname: str = option("0.0.0.0", "Address that the server would listen on.")
    port: int = option(3000, "Port that the server would listen on.", short="p", maximum=65535)
    prometheus_port: int = option(9000, "Separate port for metrics; 0 skips the check.", maximum=65535)
    master_port: int = option(29500, "Rendezvous port of the shards.", maximum=65535)
    json: bool = option(False, "Print the findings as JSON.", env=None)


def run(options: DoctorOptions) -> int:
    findings = list(examine(options))
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        show(findings, Console())
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def examine(options: DoctorOptions) -> Iterator[Finding]:
    yield from examined("python", machine.look_at_python)
    yield from examined("packages", machine.look_at_packages)
    driver = examined("driver", accelerator.look_at_driver)
    yield from driver
    gpus = [finding for finding in driver if finding.subject.startswith("GPU")]
    report = accelerator.run_probe()
    yield from examined("torch", partial(accelerator.look_at_torch, report, has_driver=bool(gpus)))
    yield from examined("triton", partial(accelerator.look_at_triton, report))
    yield from examined("CPU kernels", partial(accelerator.look_at_cpu_kernels, report))
    yield from examined("memory", partial(machine.look_at_memory, len(gpus)))
    yield from examined("disks", machine.look_at_disks)
    ports = {"--port": options.port, "--prometheus-port": options.prometheus_port, "--master-port": options.master_port}
    address = listen_address(options.hostname)
    used = {flag: port for flag, port in ports.items() if port}
    yield from examined("ports", partial(machine.look_at_ports, address, used))
    yield from examined("limits", machine.look_at_limits)
    room, where = _room(report)
    model = PlanOptions(
        model_id=options.model_id,
        revision=options.revision,
        huggingface_hub_cache=options.huggingface_hub_cache,
        weights_cache_override=options.weights_cache_override,
        trust_remote_code=options.trust_remote_code,
    )
    yield from examined("model", partial(look_at_model, model, room, where))


def _room(report: dict[str, Any]) -> tuple[int, str]:
    devices = report.get("devices") or []
    if devices:
        return int(sum(device["gib"] for device in devices) * GIB), f"{len(devices)} GPU(s)"
    return machine.available_memory(), "main memory"


def show(findings: list[Finding], console: Console) -> None:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        mark, colour = MARKS[finding.verdict]
        line = Text(f"{mark:>2} ", style=colour)
        line.append(f"{finding.subject:<{width}}  ", style="bold")
        line.append(finding.found, style="default")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"   {'':<{width}}  → {finding.remedy}"), soft_wrap=True)
    counts = Counter(finding.verdict for finding in findings)
    verdict = "This machine is ready to serve." if not counts["problem"] else "Fix the problems (X) first."
    found = ", ".join(f"{counts[kind]} {kind}{'' if counts[kind] == 1 else 's'}" for kind in ("problem", "warning"))
    console.print(f"{found}. {verdict}")


COMMAND = command(
    DoctorOptions, run, "doctor", "Check this machine and a model's files, and say how to fix what is wrong."
)
