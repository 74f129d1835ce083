"""What a workload of `legato bench engine` could take at best on a device of which three rates are known.

    python -m benchmarks.bound --workload G4 --rows-per-second 44200 --read 15e9 --bandwidth 4.3e12

No step is free: it multiplies its rows at the device's rate or reads the weights, whichever takes longer, and reads the
keys and values of every decode; nothing else takes time here. A row that samples is multiplied by the head as well.
Requests run in the order they came in, all of them at once, prompts in steps of `--step-tokens`.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from legato.benchmark.engine.workloads import Workload, make_workloads

VOCABULARY = 128_256
HEAD = 128_256 * 4096 / (32 * (4096 * (6144 + 4096) + 3 * 4096 * 14_336))
KV_BYTES = 2 * 32 * 8 * 128 * 2  # of one token: keys and values, layers, heads, size, bytes of bfloat16


@dataclass(frozen=True)
class Device:
    rows_per_second: float  # of matrix products, while there are enough rows
    read_bytes: float  # of weights, by every step
    bandwidth: float
    kv_bytes: float
    head: float  # what the logits of a row cost, as a share of the rest of its products

    def seconds(self, num_rows: int, num_sampled: int, context: int) -> float:
        """Of a step: so many rows, some of which sample, and so many tokens in the cache that its decodes look back
        on."""
        products = max((num_rows + self.head * num_sampled) / self.rows_per_second, self.read_bytes / self.bandwidth)
        return products + context * self.kv_bytes / self.bandwidth


@dataclass
class Running:
    context: int
    left: int  # tokens yet to be generated


def seconds(workload: Workload, device: Device, step_tokens: int) -> tuple[float, int]:
    """Of all its steps, and how many these are."""
    waiting = deque((len(prompt), new) for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True))
    running: list[Running] = []
    total, num_steps, computed = 0.0, 0, 0  # of the first waiting prompt
    while waiting or running:
        room, num_rows, begun = step_tokens - len(running), len(running), []
        while waiting and room > 0:
            length, new = waiting[0]
            piece = min(room, length - computed)
            room, num_rows, computed = room - piece, num_rows + piece, computed + piece
            if computed == length:
                begun.append(Running(length, new - 1))
                waiting.popleft()
                computed = 0
        total += device.seconds(num_rows, len(running) + len(begun), sum(each.context for each in running))
        num_steps += 1
        for each in running:
            each.context, each.left = each.context + 1, each.left - 1
        running = [each for each in (*running, *begun) if each.left > 0]
    return total, num_steps


def summary(workloads: Sequence[Workload], device: Device, step_tokens: int) -> str:
    lines = []
    for workload in workloads:
        taken, num_steps = seconds(workload, device, step_tokens)
        lines.append(
            f"{workload.name}: {taken:.2f} s in {num_steps} steps at best, {workload.num_in / taken:,.0f} tok/s in,"
            f" {workload.num_out / taken:,.0f} tok/s out"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["G1", "G2", "G3", "G4"])
    parser.add_argument("--rows-per-second", type=float, default=44_200, help="that matrix products sustain")
    parser.add_argument("--read", type=float, default=15e9, help="bytes of weights that a step reads")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second that the memory gives")
    parser.add_argument("--kv-bytes", type=float, default=KV_BYTES, help="of one token in the cache")
    parser.add_argument("--head", type=float, default=HEAD, help="cost of a row's logits, of its other products'")
    parser.add_argument("--step-tokens", type=int, default=2048, help="rows of a step at most")
    options = parser.parse_args()
    device = Device(options.rows_per_second, options.read, options.bandwidth, options.kv_bytes, options.head)
    print(summary(make_workloads(options.workload, 1, VOCABULARY), device, options.step_tokens))


if __name__ == "__main__":
    main()
