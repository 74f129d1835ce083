"""TGI's unary calls on top of the engine: batches kept under an id, texts and stopping in the shard.

Legato's router sends steps (`Tokens`) instead. These calls are for other clients: a TGI router, a benchmark, a script.
A batch is a list of members, and a member is a row: `concatenate` is list addition, `filter` frees rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import grpc

from legato.pb import generate_pb2 as pb
from legato.server.interceptor import RequestRefused
from legato.server.memory.capacity import RESERVED_BLOCKS, Capacity
from legato.text.detokenize import Detokenizer, Vocabulary
from legato.text.stopping import StopMatcher

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


class RowAndBlockAllocator:
    """Hands out rows and blocks; callers may also choose blocks themselves."""

    def __init__(self, capacity: Capacity) -> None:
        self.rows = set(range(capacity.max_rows))
        self.blocks = set(range(RESERVED_BLOCKS, capacity.num_blocks))
        # How many requests share a block that their caller chose: prefixes are shared.
        self._sharers: Counter[int] = Counter()

    def take_row(self) -> int:
        if not self.rows:
            raise RequestRefused(
                "no row is free: more requests are running than `max_rows` of Warmup or this shard's --max-batch-size",
                EXHAUSTED,
            )
        return self.rows.pop()

    def take_blocks(self, count: int) -> list[int]:
        if count > len(self.blocks):
            raise RequestRefused(f"{count} KV blocks needed, {len(self.blocks)} free", EXHAUSTED)
        return [self.blocks.pop() for _ in range(count)]

    def share_blocks(self, blocks: list[int], count: int) -> list[int]:
        """The blocks that a caller chose: enough, each only once, and none that the shard allocated to others."""
        if len(blocks) < count:
            raise RequestRefused(f"{count} KV blocks needed, {len(blocks)} given")
        taken = [block for block in blocks if block not in self.blocks and not self._sharers[block]]
        # TGI's router keeps block 0 for requests of one token that only ask whether the model still computes. Padded
        # rows write there, too: what such a request computes is never looked at.
        wrong = [block for block in taken if block >= RESERVED_BLOCKS or len(blocks) > 1]
        if wrong or len(set(blocks)) < len(blocks):
            what = f"block {wrong[0]} is not free" if wrong else "a block is named twice"
            raise RequestRefused(f"KV blocks as given: {what}")
        self._sharers.update(blocks)
        self.blocks.difference_update(blocks)
        return blocks

    def free(self, row: int, blocks: list[int]) -> None:
        self.rows.add(row)
        for block in blocks:
            self._sharers[block] -= 1
            if self._sharers[block] <= 0:
                del self._sharers[block]
                if block >= RESERVED_BLOCKS:
                    self.blocks.add(block)


@dataclass(slots=True)
class Member:
    """One request of a batch: its parameters, its row, and its progress."""

    request: pb.Request
    input_ids: list[int]
    row: int
    blocks: list[int]
    detokenizer: Detokenizer
    stops: StopMatcher
    num_computed: int
    images: list[pb.AdmittedImage] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    num_generated: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    admitted: bool = False
    adapter: int = 0  # its number; 0: none
    # `input_ids` without the token that a decoder begins with.
    num_prompt_tokens: int = 0

    @property
    def num_to_compute(self) -> int:
        return len(self.input_ids) + self.num_generated - self.num_computed


class UnaryBatch:
    def __init__(self, batch_id: int, members: list[Member]) -> None:
        self.id = batch_id
        self.members = members

    def __len__(self) -> int:
        return len(self.members)

    @classmethod
    def concatenate(cls, batches: list[UnaryBatch]) -> UnaryBatch:
        return cls(batches[0].id, [member for batch in batches for member in batch.members])

    def filter(self, request_ids: Iterable[int]) -> tuple[UnaryBatch, list[Member]]:
        """The members to keep, and those that leave."""
        kept = set(request_ids)
        missing = kept - {member.request.id for member in self.members}
        if missing:
            raise RequestRefused(f"batch {self.id} has no request {min(missing)}")
        leaving = [member for member in self.members if member.request.id not in kept]
        return UnaryBatch(self.id, [member for member in self.members if member.request.id in kept]), leaving

    def to_pb(self) -> pb.CachedBatch:
        total = sum(len(m.input_ids) + m.request.stopping_parameters.max_new_tokens for m in self.members)
        return pb.CachedBatch(
            id=self.id,
            request_ids=[member.request.id for member in self.members],
            size=len(self.members),
            max_tokens=total,
            current_tokens=sum(member.num_to_compute for member in self.members),
        )


class BatchCache:
    """Batches between two calls, by id."""

    def __init__(self) -> None:
        self._batches: dict[int, UnaryBatch] = {}

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._batches

    def __iter__(self) -> Iterator[int]:
        return iter(self._batches)

    def set(self, batch: UnaryBatch) -> None:
        assert batch.id not in self._batches, f"batch {batch.id} would be lost with its rows"
        self._batches[batch.id] = batch

    def get(self, batch_id: int) -> UnaryBatch:
        if batch_id not in self._batches:
            raise RequestRefused(f"batch {batch_id} is not cached", grpc.StatusCode.NOT_FOUND)
        return self._batches[batch_id]

    def pop(self, batch_ids: Iterable[int]) -> list[UnaryBatch]:
        """All of them or, if one is not there, none. A batch that is named twice is one batch."""
        batches = {batch_id: self.get(batch_id) for batch_id in batch_ids}
        for batch_id in batches:
            del self._batches[batch_id]
        return list(batches.values())


@dataclass(frozen=True, slots=True)
class TokenOfMember:
    """One token of one request of a batch, and the whole text with the last one."""

    member: Member
    token_id: int
    logprob: float
    text: str
    top: tuple[list[int], list[float]] | None
    finish_reason: pb.FinishReason | None

    def to_pb(self, vocabulary: Vocabulary) -> pb.Generation:
        member = self.member
        answer = pb.Generation(
            request_id=member.request.id,
            tokens=pb.Tokens(
                ids=[self.token_id],
                logprobs=[self.logprob],
                texts=[self.text],
                is_special=[self.token_id in vocabulary.special],
            ),
        )
        if self.top is not None:
            answer.top_tokens.append(_tokens(self.top[0], self.top[1], vocabulary))
        if member.num_generated == 1 and member.request.prefill_logprobs:
            # Nothing predicts the first token, nor do cached ones, which were not computed, predict their successors.
            unknown = [float("nan")] * (len(member.input_ids) - len(member.prompt_logprobs))
            answer.prefill_tokens.CopyFrom(_tokens(member.input_ids, unknown + member.prompt_logprobs, vocabulary))
        if self.finish_reason is not None:
            answer.generated_text.CopyFrom(
                pb.GeneratedText(
                    text="".join(member.pieces),
                    generated_tokens=member.num_generated,
                    finish_reason=self.finish_reason,
                    seed=member.request.parameters.seed if member.request.parameters.do_sample else None,
                    prompt_tokens=member.num_prompt_tokens,
                )
            )
        return answer


def _tokens(ids: list[int], logprobs: list[float], vocabulary: Vocabulary) -> pb.Tokens:
    return pb.Tokens(
        ids=ids,
        logprobs=logprobs,
        texts=[vocabulary.text(token_id) for token_id in ids],
        is_special=[token_id in vocabulary.special for token_id in ids],
    )
