"""The workloads W1 to W5 and what is measured in them. Prompts are token ids, so that all engines get the same work.

A run has prompts of its own (`seed`), so that nothing is found in a prefix cache but what the run itself left there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from legato.benchmark.serve.client import Record
from legato.benchmark.serve.work import WORDS
from legato.common.errors import OptionError
from legato.modelfiles.files import ModelFiles

# Fewer words of one token than these make prompts that are too much alike; then ids are drawn from the vocabulary.
FEW_WORDS = 16


@dataclass(frozen=True, slots=True)
class CpuWorkload:
    """`streams` clients send `num_requests` requests, each client the next one after its answer."""

    name: str
    streams: int
    num_requests: int
    prompt_len: int
    new_tokens: int
    shared_len: int = 0  # tokens that all prompts start with

    def prompts(self, vocabulary: Sequence[int], seed: int) -> list[list[int]]:
        rng = random.Random(f"{self.name}/{seed}")
        shared = rng.choices(vocabulary, k=self.shared_len)
        return [shared + rng.choices(vocabulary, k=self.prompt_len - self.shared_len) for _ in range(self.num_requests)]


WORKLOADS = {
    each.name: each
    for each in (
        CpuWorkload("W1", streams=1, num_requests=4, prompt_len=128, new_tokens=128),
        CpuWorkload("W2", streams=16, num_requests=64, prompt_len=128, new_tokens=128),
        CpuWorkload("W3", streams=1, num_requests=4, prompt_len=1024, new_tokens=64),
        CpuWorkload("W4", streams=8, num_requests=32, prompt_len=800, new_tokens=16, shared_len=768),
        CpuWorkload("W5", streams=8, num_requests=16, prompt_len=128, new_tokens=128),
    )
}
WARM_UP = CpuWorkload("warm-up", streams=1, num_requests=1, prompt_len=64, new_tokens=16)
MAX_STREAMS = max(each.streams for each in WORKLOADS.values())
# Tokens of the longest request, rounded up for engines that allocate by it.
LONGEST = 2048


def chosen(names: Sequence[str], scale: int) -> list[CpuWorkload]:
    """The workloads of these names, with a `scale`-th of their requests and tokens."""
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise OptionError(f"--workload {unknown[0]}: it must be one of {', '.join(WORKLOADS)}")
    return [_scaled(WORKLOADS[name], scale) for name in dict.fromkeys(names)]


def _scaled(workload: CpuWorkload, scale: int) -> CpuWorkload:
    def part(count: int) -> int:
        return max(1, count // scale)

    return CpuWorkload(
        workload.name,
        workload.streams,
        max(min(workload.streams, 2), part(workload.num_requests)),
        max(2, part(workload.prompt_len)),
        max(2, part(workload.new_tokens)),
        workload.shared_len // scale,
    )


def vocabulary_of(files: ModelFiles) -> list[int]:
    """Tokens to make prompts of: common words, so that answers are ordinary text."""
    tokenizer = files.tokenizer()
    encoded = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in WORDS.split()]
    words = [ids[0] for ids in encoded if len(ids) == 1]
    if len(words) >= FEW_WORDS:
        return words
    size = tokenizer.get_vocab_size()
    return list(range(size // 10, size * 9 // 10))


@dataclass(frozen=True, slots=True)
class CpuFigures:
    """One run of one workload, as its clients saw it."""

    seconds: float
    token_ms: float | None  # mean over the requests, after the first token
    first_token_ms: float  # median over the requests
    out_per_second: float
    in_per_second: float  # prompt tokens until the first token of a request
    num_tokens: int

    @classmethod
    def of(cls, workload: CpuWorkload, records: Sequence[Record], seconds: float) -> CpuFigures:
        gaps = [gap for record in records if (gap := record.mean_gap) is not None]
        first = median(record.ttft for record in records if record.ttft is not None)
        num_tokens = sum(record.num_tokens for record in records)
        return cls(
            seconds,
            mean(gaps) * 1e3 if gaps else None,
            first * 1e3,
            num_tokens / seconds,
            workload.prompt_len / first,
            num_tokens,
        )
