"""Checks the responses of the shards: every step once, in order, and the same tokens from all shards.

All shards of a model sample from the same gathered logits. One that has another token feeds it to its next step, and
from then on computes something else than the others.
"""

from __future__ import annotations

from collections import deque

from legato.pb import generate_pb2 as pb

# Answers by which a shard may be behind another. Collectives keep them together, whatever their speed.
MAX_BEHIND = 64


class StepAnswers:
    def __init__(self, num_shards: int, first: int = 0) -> None:
        """Tokens come from rank `first` and those behind it: the last stage of a pipeline."""
        self._first = first
        self._asked: list[deque[int]] = [deque() for _ in range(num_shards)]
        # Answers that other shards have not given yet; of a single shard there are none.
        self._unmatched: list[deque[pb.StepResponse]] = [deque() for _ in range(num_shards)]

    def ask(self, step_id: int) -> None:
        for asked in self._asked:
            asked.append(step_id)

    def problem(self, rank: int, response: pb.StepResponse) -> str | None:
        """What is wrong: nobody asked for this answer, or it is not that of the others."""
        asked = self._asked[rank]
        expected = asked.popleft() if asked else None
        if response.id != expected:
            instead = "no step is to be answered" if expected is None else f"the next one is step {expected}"
            return f"shard {rank} answered step {response.id}, but {instead}"
        return self._difference(rank, response) if len(self._asked) > self._first + 1 else None

    def _difference(self, rank: int, response: pb.StepResponse) -> str | None:
        if rank < self._first:
            return None
        self._unmatched[rank].append(response)
        compared = self._unmatched[self._first :]
        while all(compared):
            first, *others = [answers.popleft() for answers in compared]
            for other_rank, other in enumerate(others, self._first + 1):
                if not _agree(first, other):
                    return f"shard {other_rank} sampled other tokens in step {first.id} than shard {self._first}"
        if len(self._unmatched[rank]) > MAX_BEHIND:
            slowest = min(range(self._first, len(self._unmatched)), key=lambda each: len(self._unmatched[each]))
            return f"shard {slowest} has not answered {MAX_BEHIND} steps that shard {rank} has"
        return None


def _agree(first: pb.StepResponse, other: pb.StepResponse) -> bool:
    """Requests whose row failed on the first shard have ended, so the others may have any token there."""
    if first.HasField("error") or first.token_ids == other.token_ids:
        return True
    failed = {row.index for row in first.row_errors}
    return len(first.token_ids) == len(other.token_ids) and all(
        mine == theirs or index in failed
        for index, (mine, theirs) in enumerate(zip(first.token_ids, other.token_ids, strict=True))
    )
