"""The layouts of a model over machines as `legato plan --machines` shows them, and commands that start the best."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from legato.plan.layouts import Layout, Machines, best, layouts
from legato.plan.memory import MemoryPlan

GIB = 2**30
PORT = 3000


@dataclass(frozen=True)
class Spread:
    plan: MemoryPlan
    machines: Machines
    # The launcher and its arguments for the model and its formats; none for a shape without weights.
    words: list[str]

    @property
    def layouts(self) -> list[Layout]:
        return layouts(self.plan, self.machines)

    @property
    def best(self) -> Layout | None:
        return best(self.plan, self.layouts)

    def commands(self) -> list[str]:
        """What to run on which machine."""
        chosen, machines = self.best, self.machines
        if chosen is None or not self.words:
            return []
        words = list(self.words)
        if chosen.tokens < self.plan.shape.max_positions:
            words += ["--max-total-tokens", str(chosen.tokens)]
        if chosen.gpus > machines.gpus:
            return [*self._group(chosen, words), *self._route(chosen.replicas, [PORT])]
        each = machines.gpus // chosen.tensor
        gpus, shards = ",".join(map(str, range(chosen.tensor))), str(chosen.tensor)
        line = shlex.join([*words, "--num-shard", shards, "--port", str(PORT + 1)])
        where = "every machine" + (f", {each} times with the next GPUs and port" if each > 1 else "")
        model = [*words[1:3]] if words[1:2] == ["--model-id"] else []
        ray = ["legato", "ray", *model, "--replicas", str(chosen.replicas), "--tensor-parallel", shards]
        rest = words[1 + len(model) :]
        return [
            f"{where}:  CUDA_VISIBLE_DEVICES={gpus} {line}",
            *self._route(machines.count, [PORT + 1 + number for number in range(each)]),
            f"or with Ray:  {shlex.join([*ray, *(['--', *rest] if rest else [])])}",
        ]

    def _group(self, chosen: Layout, words: list[str]) -> list[str]:
        """Machines that run one replica together."""
        size = -(-chosen.gpus // self.machines.gpus)
        shards = str(min(chosen.tensor, self.machines.gpus))
        words = [*words, "--num-shard", shards, "--nnodes", str(size), "--master-addr", "MACHINE-0"]
        words += ["--pipeline-parallel-size", str(chosen.stages)] if chosen.stages > 1 else []
        line = shlex.join([*words, "--cluster-key-file", "KEY-FILE", "--port", str(PORT)])
        return [f"machine I of each {size}:  {line} --node-rank I"]

    def _route(self, count: int, ports: list[int]) -> list[str]:
        if count * len(ports) < 2:
            return []
        urls = f"--replica http://MACHINE:{ports[0]} …"
        return [f"one endpoint, for {count * len(ports)} replicas:  legato route --route-key KEY {urls}"]

    def to_json(self) -> dict[str, Any]:
        chosen = self.best
        return {
            "machines": asdict(self.machines),
            "layouts": [{**asdict(each), "gpus": each.gpus, "tokens": each.tokens} for each in self.layouts],
            "best_layout": None if chosen is None else {**asdict(chosen), "tokens": chosen.tokens},
            "commands": self.commands(),
        }

    def show(self, console: Console) -> None:
        machines, chosen = self.machines, self.best
        console.print(
            f"Over {machines.count} machines with {machines.gpus} GPUs each, {machines.network * 8e-9:g} Gbit/s between"
            f" machines, {machines.fabric * 1e-9:g} GB/s between the GPUs of one; links for {self.plan.num_rows} rows:",
            soft_wrap=True,
        )
        table = Table(
            "TP", "PP", "Replicas", "Weights", "KV tokens", "of all replicas", "Sent per token", "Links per step"
        )
        for each in self.layouts:
            if each == chosen or each.tokens:
                table.add_row(*self._row(each), style="bold" if each == chosen else None)
        console.print(table)
        if chosen is None:
            console.print("It fits in no layout: more or larger machines are needed.")
            return
        parts = f"TP {chosen.tensor}, PP {chosen.stages}, {chosen.replicas} replica{'s' if chosen.replicas > 1 else ''}"
        console.print(f"Best: {parts}.", *(f"  {line}" for line in self.commands()), sep="\n", soft_wrap=True)

    @staticmethod
    def _row(each: Layout) -> list[str]:
        sent = f"{each.reduced / 1e6:.2f} MB{' over network' if each.over_network else ''}" if each.reduced else "0"
        sent += f" + {each.passed / 1e3:.0f} kB" if each.passed else ""
        total = f"{each.tokens * each.replicas:,}"
        sizes = (f"{each.weights / GIB:.1f} GiB", f"{each.tokens:,}", total, sent, f"{each.link_seconds * 1e3:.2f} ms")
        return [str(each.tensor), str(each.stages), str(each.replicas), *sizes]
