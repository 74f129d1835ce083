"""Prints as JSON what torch, Triton and the CPU kernels can do here. A process of its own: a broken installation may
crash it.

python -m legato.doctor.probe
"""

from __future__ import annotations

import json
import sys
from typing import Any

GIB = 2**30


def torch_report() -> dict[str, Any]:
    import torch

    report: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": []}
    report["sum"] = float(torch.ones(8).sum())
    if torch.version.cuda is None:
        return report
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return report | {"cuda_error": _first_line(error)}
    report["devices"] = [_device(index) for index in range(torch.cuda.device_count())]
    nccl: Any = torch.cuda.nccl
    report["nccl"] = ".".join(map(str, nccl.version())) if report["devices"] else None
    return report


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    facts: dict[str, Any] = {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "gib": round(properties.total_memory / GIB, 1),
    }
    try:
        free, _ = torch.cuda.mem_get_info(index)
        total = float(torch.ones(8, device=f"cuda:{index}").sum())
        return facts | {"free_gib": round(free / GIB, 1), "sum": total}
    except RuntimeError as error:
        return facts | {"error": _first_line(error)}


def triton_report(has_device: bool) -> dict[str, Any]:
    """Compiles and runs a kernel where there is a device: that takes a C compiler, too."""
    try:
        import triton
    except ImportError as error:
        return {"triton_error": _first_line(error)}
    report: dict[str, Any] = {"triton": triton.__version__}
    if not has_device:
        return report
    try:
        import torch

        from legato.kernels import activation

        pairs = torch.ones(4, 256, device="cuda", dtype=torch.float16)
        # The kernel itself: its public function takes torch where it fails.
        report["kernel"] = float(activation._gate_and_mul_triton(pairs, "silu").float().mean())
    except Exception as error:  # compilers raise all kinds of exceptions
        report["kernel_error"] = _first_line(error)
    return report


def cpu_report() -> dict[str, Any]:
    """The kernels that a model on the CPU would be computed by."""
    from legato.cpu.library import library
    from legato.cpu.threads import usable_cores

    kernels = library()
    return {"cpu_kernels": None if kernels is None else kernels.instruction_set, "cpu_cores": usable_cores()}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def main() -> None:
    report = torch_report()
    json.dump(report | triton_report(bool(report["devices"])) | cpu_report(), sys.stdout)


if __name__ == "__main__":
    main()
