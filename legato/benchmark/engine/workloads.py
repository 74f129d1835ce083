"""Fixed workloads for the engine: prompts as token ids, and how many tokens to generate for each.

The seeds and the order of the random calls are part of the definition: other engines were measured with the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from legato.common.errors import OptionError

# Ids of a Llama 3 vocabulary, which has 128,256, clear of its special tokens.
FIRST_ID, END_ID = 10, 120_000


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    new_tokens: list[int]
    # Off unless it is what is measured: repeated prompts would otherwise be cached.
    prefix_caching: bool = False
    # The same computation without the cache, which this workload should hardly exceed.
    baseline: Workload | None = None

    @property
    def num_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_out(self) -> int:
        return sum(self.new_tokens)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Prompt and answer together, of each request."""
        return [len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens, strict=True)]

    def cache_tokens(self, block_size: int) -> int:
        """Cache in which all requests run at once without preemption: whole blocks, and one more for each."""
        return sum(-(-length // block_size) + 1 for length in self.lengths) * block_size


@dataclass(frozen=True)
class Scale:
    """Sizes for this machine and this model."""

    divisor: int
    vocab_size: int

    def __call__(self, number: int) -> int:
        return max(1, number // self.divisor)

    def prompts(self, count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
        """A smaller vocabulary folds the ids, so that every model gets the same number of tokens."""
        rng = random.Random(seed)
        shortest, longest = self(shortest), self(longest)
        return [
            [rng.randrange(FIRST_ID, END_ID) % self.vocab_size for _ in range(rng.randint(shortest, longest))]
            for _ in range(self(count))
        ]


def _uniform(name: str, count: int, prompt: int, new: int, seed: int) -> Callable[[Scale], Workload]:
    def make(scale: Scale) -> Workload:
        prompts = scale.prompts(count, prompt, prompt, seed)
        return Workload(name, prompts, [scale(new)] * len(prompts))

    return make


def _mixed(scale: Scale) -> Workload:
    prompts = scale.prompts(512, 64, 1024, seed=4)
    rng = random.Random(7)
    return Workload("G4", prompts, [rng.randint(scale(16), scale(512)) for _ in prompts])


def _prefix(scale: Scale) -> Workload:
    """Requests with a common prefix. With the cache they should cost little more than one prefix and all suffixes."""
    (prefix,) = scale.prompts(1, 2048, 2048, seed=5)[:1]
    suffixes = scale.prompts(64, 64, 64, seed=6)
    parts = [prefix, *suffixes]
    baseline = Workload("prefix, its parts", parts, [1] * len(parts))
    return Workload("prefix", [prefix + suffix for suffix in suffixes], [1] * len(suffixes), True, baseline)


WORKLOADS: dict[str, Callable[[Scale], Workload]] = {
    "G1": _uniform("G1", 1, 128, 128, seed=1),
    "G2": _uniform("G2", 256, 128, 256, seed=2),
    "G3": _uniform("G3", 64, 2048, 1, seed=3),
    "G4": _mixed,
    "prefix": _prefix,
}


def check_names(names: Sequence[str]) -> list[str]:
    """The names without repetition, `all` expanded."""
    for name in names:
        if name not in WORKLOADS and name != "all":
            raise OptionError(f"--workload {name}: must be one of {', '.join(WORKLOADS)} or all")
    return list(WORKLOADS) if "all" in names else list(dict.fromkeys(names))


def make_workloads(names: Sequence[str], divisor: int, vocab_size: int) -> list[Workload]:
    scale = Scale(divisor, vocab_size)
    return [WORKLOADS[name](scale) for name in names]


def custom(count: int, prompt: int, new: int, vocab_size: int) -> Workload:
    return _uniform("custom", count, prompt, new, seed=0)(Scale(1, vocab_size))
