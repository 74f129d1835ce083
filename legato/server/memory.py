"""How much memory the KV cache may take."""

from __future__ import annotations

import os

import torch

# Left to everything else on a machine whose memory is not ours alone.
CPU_SHARE = 0.5
# Left to fragmentation and to what libraries allocate behind torch's back.
CUDA_SHARE = 0.90


def available_for_cache(device: torch.device, fraction: float) -> int:
    """Bytes, after the weights are loaded and a largest step has been run."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - fraction * CUDA_SHARE) * total))
    return int(_available_ram() * CPU_SHARE * fraction)


def _available_ram() -> int:
    """What the system could give without swapping; half of all memory where it does not say."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
