"""The scheduler's data types: requests, outputs and steps."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from legato.scheduling.adapters import NO_ADAPTER, Placement

# Where a shard has no guess at a token.
NO_PROPOSAL = 2**32 - 1
# 0 is served first.
LAST_PRIORITY = 9
DEFAULT_PRIORITY = 5


class FinishReason(StrEnum):
    """Why generation ended, as TGI's values."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model and its memory allow. Known once the shards are warm, fixed from then on."""

    max_input_tokens: int
    max_total_tokens: int
    # Tokens that the KV cache holds.
    max_batch_total_tokens: int
    vocab_size: int
    block_size: int = 16
    eos_token_ids: frozenset[int] = frozenset()
    # An encoder reads the prompt: the answer is a text of its own, not the prompt's continuation.
    has_encoder: bool = False
    # Seconds that the largest step may take, where they are known to be many.
    longest_step: float = 0.0


class PromptSpan(Struct, frozen=True, array_like=True):
    """Where an image is in a prompt: tokens [start, start + num_tokens), which a shard knows by the one `token_id`.

    In `input_ids` they are digests of the image instead, so that the prefix cache never confuses two images.
    """

    start: int
    num_tokens: int
    token_id: int


class GenerationRequest(Struct, frozen=True):
    """A validated request: every limit is checked, the prompt is token ids. What the scheduler admits."""

    id: int
    input_ids: list[int]
    max_new_tokens: int
    # A serialized `pb.Admission` with what only a shard reads: sampling parameters, grammar, top tokens, images.
    # Validation makes it once; the scheduler carries it unread.
    payload: bytes = b""
    ignore_eos: bool = False
    # Tokens that end this request besides the model's own, and how many tokens come before any of them counts.
    stop_token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    prompt_logprobs: bool = False
    images: tuple[PromptSpan, ...] = ()
    priority: int = DEFAULT_PRIORITY
    # Who shares the server with others of equal priority: a digest of the API key, the same for all without keys.
    tenant: str = ""
    # The number of its LoRA adapter; 0: none.
    adapter: int = NO_ADAPTER
    # A grammar says what may follow: where that is only one text, a shard can tell.
    has_grammar: bool = False
    # W3C trace context of the span that its prompt chunks belong to; empty if it is not traced.
    traceparent: str = ""
    # Tokens that another server has generated already: it goes on after them, as after a preemption.
    emitted_ids: list[int] = []

    @property
    def prefill_work(self) -> int:
        """Prompt tokens; those of images twice, because encoding an image takes about as long."""
        return len(self.input_ids) + sum(image.num_tokens for image in self.images)


class Output(Struct, gc=False):
    """One token of one request, as the scheduler hands it to the text side. `error` ends the request instead.

    A struct, because one is made for every token: that takes a third of the time of a dataclass.
    """

    token_id: int = -1
    logprob: float = 0.0
    top_tokens: list[tuple[int, float]] | None = None
    # Comes with the first token: one number per prompt token, None for the first, which nothing predicts.
    prompt_logprobs: list[float | None] | None = None
    # ... and, if top tokens were asked for too, the likeliest tokens in each prompt token's place.
    prompt_top_tokens: list[list[tuple[int, float]] | None] | None = None
    # Comes with the first token: how many prompt tokens were in the prefix cache, and the seconds spent in the queue.
    num_cached: int = 0
    queue_time: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None
    # It was a draft: the step that brought it had brought another token before.
    is_draft: bool = False
    # The error is that it took longer than the operator allows.
    timed_out: bool = False
    # The error is that the server is full: seconds after which it is worth asking again.
    retry_after: int = 0
    # The error is that its adapter is not loaded any more.
    is_unknown: bool = False
    # The error is that this server computes nothing any more: another one may go on.
    is_lost: bool = False
    # What shards that embed texts made of it, as 32-bit floats; the token means nothing then.
    vector: bytes | None = None


class PromptChunk(Struct, frozen=True, array_like=True):
    """A part of a traced request's prompt that a step computed. Times in nanoseconds since 1970."""

    span_id: int
    step_id: int
    start_ns: int
    end_ns: int
    forward_ns: int
    num_tokens: int
    num_cached: int
    # Rows of the step.
    batch_size: int


@dataclass(slots=True)
class Admission:
    """A request enters a row: `num_cached` leading tokens are in `blocks` already."""

    row: int
    request: GenerationRequest
    input_ids: array[int]
    num_generated: int
    num_cached: int
    blocks: list[int]
    # Of a request with an adapter: what the shards call it, and where it is on the device.
    adapter_name: str = ""
    adapter_slot: int = 0


@dataclass(slots=True)
class StepPlan:
    """What one step computes. The three lists run in parallel; `new_blocks[i]` extends the table of `rows[i]`."""

    id: int
    admitted: list[Admission]
    rows: list[int]
    num_tokens: list[int]
    new_blocks: list[list[int]]
    # Guesses at what follows, for rows that decode: they are the last of its `num_tokens`. No other step is planned
    # until the result of one with drafts is here.
    drafts: dict[int, list[int]] = field(default_factory=dict)
    # Guesses that the shards are to return for each row that samples, for the next step to verify.
    num_proposals: int = 0
    # For that they may have to read texts that they have not guessed at so far: its time says nothing about others.
    is_catching_up: bool = False
    # (row, traceparent) of the prompts that are traced; only with tracing.
    traces: list[tuple[int, str]] = field(default_factory=list)
    # Adapters that are brought to the device before its rows are computed.
    placements: list[Placement] = field(default_factory=list)
    # Before anything is computed: (block, slot) of blocks that are copied to host memory, then (slot, block) of those
    # that are copied back.
    copies_out: list[tuple[int, int]] = field(default_factory=list)
    copies_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_waited_for(self) -> bool:
        """Whether what the next step computes depends on the result of this one."""
        return bool(self.drafts or self.num_proposals)


@dataclass(slots=True)
class StepResult:
    """What came back: the tokens of each row of the plan that sampled, in the plan's order."""

    id: int
    token_ids: list[int]
    logprobs: list[float]
    # Of a step with drafts: how many of token_ids each row that sampled got. Else empty: one each.
    num_sampled: list[int] = field(default_factory=list)
    # As many as the plan asked for of each row that sampled.
    proposed_ids: list[int] = field(default_factory=list)
    # index into token_ids -> (ids, logprobs), for rows that asked for them
    top_tokens: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    # row -> log probabilities of the successors of the prompt tokens that this step computed
    prompt_logprobs: dict[int, list[float]] = field(default_factory=dict)
    # row -> the likeliest tokens in those places, for rows that asked for top tokens too
    prompt_top_tokens: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)
    # index into token_ids -> why that row failed; its token means nothing
    row_errors: dict[int, str] = field(default_factory=dict)
    forward_ns: int = 0
    total_ns: int = 0
    error: str | None = None
    # Of shards that embed texts: one for each of token_ids, as 32-bit floats.
    vectors: list[bytes] = field(default_factory=list)

    def output(self, index: int) -> Output:
        """What the request of token_ids[index] gets to see."""
        top_tokens = self.top_tokens.get(index) if self.top_tokens else None
        output = Output(self.token_ids[index], self.logprobs[index], top_tokens)
        if self.vectors:
            output.vector = self.vectors[index]
        return output


@dataclass(slots=True)
class SchedulerStats:
    """Plain numbers; the router's metrics read them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    replays: int = 0
