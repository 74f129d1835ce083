"""Which steps to run as CUDA graphs, and when to capture them. Plain numbers; `decode.py` captures.

Capturing takes up to some tenths of a second, in which no step runs. So a shard starts with a few sizes, each twice the
one before, fills a step up to the next of them, and captures the rest a piece at a time: what was missed most, seldom
while requests wait, and freely while the shard is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from legato.scheduling.limits import most_sampled

# Batches up to here cost what reading the weights costs, whatever their size.
SMALL = 8
# Larger ones may be doubled: with an 8B model on an H200 the launches of a step without a graph cost 25 ms, twice what
# 512 rows cost with one. So whatever comes finds a graph among those of the start.
MOST_PADDING = 1.0
# While requests wait: a size must have been missed this often, and this many steps lie between two captures.
MISSES = 4
STEPS_BETWEEN = 16
# For this many rows cuBLAS chooses a kernel on an H200 that makes the matrix products of an 8B model take 13.9 ms; with
# 32 rows more they take 11.0.
SLOW = 448


def bucket(num_rows: int) -> int:
    """The size to capture for a batch: exact for few rows, then in steps that waste at most about a tenth."""
    if num_rows <= SMALL:
        return num_rows
    step = 8 if num_rows <= 128 else 16 if num_rows <= 256 else 32
    size = -(-num_rows // step) * step
    return size + step if size == SLOW else size


def decode_sizes(max_rows: int, given: Sequence[int] = ()) -> list[int]:
    """Every size that a batch of up to `max_rows` can ask for. If some are given, only those: larger batches then run
    without a graph."""
    return sorted(set(given) or {bucket(num_rows) for num_rows in range(1, max_rows + 1)})


def mixed_sizes(max_rows: int, *, drafts: bool = False) -> list[int]:
    """Tokens of steps with prompt chunks, or with drafts, which may be few and come in every step. 64 cost what reading
    the weights costs; from a thousand tokens on the device takes longer than the host with its launches."""
    sizes = [64, *range(128, 1025, 128)] if max_rows > 64 else [64, 128, 256, 512, 1024]
    return sorted({*sizes, 8, 16, 32, 96, 192}) if drafts else sizes


def kept_rows(max_rows: int, given: Sequence[int] = (), *, drafts: bool = False) -> list[int]:
    """Of every graph that there may be: how many rows of logits it keeps. Those of steps with prompts share theirs."""
    shared = most_sampled(max_rows) if drafts else max_rows
    return [*decode_sizes(max_rows, given), shared, *(0 for _ in mixed_sizes(max_rows, drafts=drafts)[1:])]


class CapturePolicy:
    """Decisions depend on the steps alone, so that the shards of one model come to the same ones; `when_idle` is for a
    shard that has no others.
    """

    def __init__(self, sizes: Sequence[int], small: int = SMALL, are_given: bool = False) -> None:
        """Of steps, in rows or tokens. Any up to `small` may run with any graph up to there."""
        self._are_given = are_given
        self.sizes = list(sizes)
        self._small = small
        self.captured: set[int] = set()
        self._misses: Counter[int] = Counter()
        self._steps = 0  # since the last capture
        self._stopped = False

    @property
    def at_start(self) -> list[int]:
        """The largest first: the memory that it takes is there for all others. Sizes that were given
        are all captured."""
        if self._are_given:
            return self.sizes[::-1]
        halved = [self.sizes[-1]]
        while (half := next((size for size in self.sizes if 2 * size >= halved[-1]), halved[-1])) < halved[-1]:
            halved.append(half)
        return halved

    @property
    def num_pending(self) -> int:
        return 0 if self._stopped else len(self.sizes) - len(self.captured)

    def choose(self, size: int) -> int | None:
        """The captured size to run a step with; None to run it without a graph. Remembers what was missing."""
        wanted = next((larger for larger in self.sizes if larger >= size), None)
        if wanted is None or wanted in self.captured:
            return wanted
        self._misses[wanted] += 1
        larger = min((captured for captured in self.captured if captured >= size), default=None)
        if larger is not None and larger <= max(self._small, size * (1 + MOST_PADDING)):
            return larger
        return None

    def after_step(self) -> int | None:
        """The size to capture now, though requests may be waiting."""
        self._steps += 1
        if not self.num_pending or self._steps < STEPS_BETWEEN:
            return None
        (size, misses), *_ = self._misses.most_common(1) or [(0, 0)]
        return size if misses >= MISSES else None

    def when_idle(self) -> int | None:
        """The size to capture while idle: what was missed, then the small ones, then all."""
        if not self.num_pending:
            return None
        for size in [*(size for size, _ in self._misses.most_common()), 1, 2, 4, SMALL, *self.sizes]:
            if size in self.sizes and size not in self.captured:
                return size
        return None

    def note(self, size: int) -> None:
        """`size` has its graph now."""
        self.captured.add(size)
        self._misses.pop(size, None)
        self._steps = 0

    def stop(self) -> None:
        """No more captures; what is captured stays."""
        self._stopped = True
