"""What `benchmarks.long_context` has both engines compute: long prompts, decodes over long contexts and small batches.

Every run of a case has prompts of its own, because engines may remember what they computed. Decodes over a context are
the exception: its prompts are computed once, and then the same prompts have one token and `new` + 1 tokens; what the
second takes longer than the first are `new` steps of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from legato.benchmark.engine.workloads import Scale, Workload

Figure = Literal["seconds", "out_per_second", "step_ms"]


@dataclass(frozen=True)
class Case:
    name: str
    count: int
    prompt: int
    new: int
    figure: Figure = "seconds"
    repeat: int = 2

    @property
    def num_tokens(self) -> int:
        """Room for its requests, in whole blocks, and for answers that are remembered."""
        return self.count * (self.prompt + self.new + 256)

    def workload(self, number: int, new: int, scale: Scale) -> Workload:
        """With the prompts of this number."""
        prompts = scale.prompts(self.count, self.prompt, self.prompt, seed=1000 * self.prompt + self.count + number)
        return Workload(self.name, prompts, [new] * len(prompts), prefix_caching=self.figure == "step_ms")


CASES = (
    Case("8 x 32,768 / 128", 8, 32_768, 128),
    Case("64 x 4,096 / 256", 64, 4096, 256),
    Case("1 x 100,000 / 1", 1, 100_000, 1),
    Case("16 x 32,768 decode", 16, 32_768, 96, "step_ms"),
    Case("2 x 128 / 256", 2, 128, 256, "out_per_second", repeat=3),
    Case("4 x 128 / 256", 4, 128, 256, "out_per_second", repeat=3),
    Case("8 x 128 / 256", 8, 128, 256, "out_per_second", repeat=3),
)
LONGEST = max(case.prompt + case.new for case in CASES) + 96


def chosen(names: str) -> list[Case]:
    """Those whose name begins with one of these, separated by semicolons; all if there are none."""
    wanted = [name.strip() for name in names.split(";") if name.strip()]
    return [case for case in CASES if not wanted or any(case.name.startswith(name) for name in wanted)]


def runs(case: Case, scale: Scale) -> Iterator[Workload]:
    """Whose seconds `collected` wants, in this order."""
    if case.figure != "step_ms":
        yield from (case.workload(number, scale(case.new), scale) for number in range(case.repeat))
        return
    yield case.workload(0, 1, scale)
    for _ in range(case.repeat):
        yield case.workload(0, 1, scale)
        yield case.workload(0, case.new + 1, scale)


def collected(case: Case, seconds: list[float], scale: Scale) -> dict[str, Any]:
    """Figures from what `runs` took. The fastest run counts."""
    if case.figure == "step_ms":
        computed, *rest = seconds
        steps = [1e3 * (long - short) / case.new for short, long in zip(rest[::2], rest[1::2], strict=True)]
        return {"step_ms": min(steps), "runs": steps, "prompts_seconds": computed}
    best, num_out = min(seconds), scale(case.count) * scale(case.new)
    return {"seconds": best, "out_per_second": num_out / best, "runs": seconds}
