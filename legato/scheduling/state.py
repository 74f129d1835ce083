"""The vocabulary of the router on one screen: what a request asks for, what comes back, and what a step is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from legato.grammar.kinds import Grammar as Grammar
from legato.grammar.kinds import GrammarKind as GrammarKind

# 0 is served first.
LAST_PRIORITY = 9
DEFAULT_PRIORITY = 5
# Names of pictures' tokens have this bit and so many of a digest below it.
_PIECE_BITS = 62
_PICTURES = 1 << _PIECE_BITS


class FinishReason(StrEnum):
    """Why a generation ended, in TGI's words."""

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


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults are the identity: greedy, nothing filtered, nothing penalised."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    watermark: bool = False
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    # None of the end tokens is chosen before that many tokens were generated.
    min_new_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptImage:
    """A picture in a prompt, as it was sent, and its tokens [start, start + num_tokens). A shard knows them all by the
    one `token_id` that stands for pictures."""

    data: bytes
    mimetype: str
    start: int
    num_tokens: int
    token_id: int

    def names(self) -> list[int]:
        """What its tokens are called in the router: numbers beyond any vocabulary, made of a digest of the picture. So
        the prefix cache, which compares tokens, takes two pictures for one only if they are."""
        digest = int.from_bytes(hashlib.sha256(self.data).digest())
        pieces = [_PICTURES | digest >> (shift * _PIECE_BITS) & (_PICTURES - 1) for shift in range(4)]
        return [pieces[place % 4] for place in range(self.num_tokens)]


def with_names(input_ids: list[int], images: tuple[PromptImage, ...]) -> list[int]:
    """The tokens of a prompt, those of its pictures by name."""
    named = list(input_ids) if images else input_ids
    for image in images:
        named[image.start : image.start + image.num_tokens] = image.names()
    return named


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request: every limit is checked, the prompt is token ids. What the scheduler admits."""

    id: int
    input_ids: list[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    ignore_eos: bool = False
    # Tokens that end this request besides the model's own.
    stop_token_ids: frozenset[int] = frozenset()
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    adapter_id: str | None = None
    grammar: Grammar | None = None
    # In the prompt's order. In `input_ids` their tokens have the names that `PromptImage` gives them.
    images: tuple[PromptImage, ...] = ()
    priority: int = DEFAULT_PRIORITY
    # Who shares the server with others of equal priority: a digest of the API key, the same for all without keys.
    tenant: str = ""


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
    # Comes with the first token: how many prompt tokens were in the prefix cache.
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    # The error is that it took longer than the operator allows.
    timed_out: bool = False


@dataclass(slots=True)
class Admission:
    """A request enters a row: `num_cached` leading tokens are in `blocks` already."""

    row: int
    request: GenerationRequest
    input_ids: list[int]
    num_generated: int
    num_cached: int
    blocks: list[int]


@dataclass(slots=True)
class StepPlan:
    """What one step computes. The three lists run in parallel; `new_blocks[i]` extends the table of `rows[i]`."""

    id: int
    admitted: list[Admission]
    rows: list[int]
    num_tokens: list[int]
    new_blocks: list[list[int]]


@dataclass(slots=True)
class StepResult:
    """What came back: one token for each row of the plan that sampled, in the plan's order."""

    id: int
    token_ids: list[int]
    logprobs: list[float]
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
