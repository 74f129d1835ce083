"""Log probabilities of the model's own logits, before anything is done to them.

They do not depend on temperature, filters or penalties, so that two requests for the same text see the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Stands for infinity. Far beyond any logit, and still finite after every penalty and temperature.
HUGE = 1e20
# Prompts are scored this many positions at a time, to bound the memory that a long chunk takes on top of its logits.
_POSITIONS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class LikeliestTokens:
    """The likeliest tokens of the rows that asked for them: of line j, belonging to index `indices[j]` of the batch,
    the first `lengths[j]` entries, likeliest first, of equal ones the lower id first."""

    indices: list[int]
    lengths: list[int]
    token_ids: Tensor  # [m, longest] int64
    logprobs: Tensor  # [m, longest] float32


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probabilities of t tokens of a prompt, and the likeliest tokens at their positions."""

    logprobs: Tensor  # [t] float32, of the tokens that follow
    top_ids: Tensor  # [t, num_top] int64, likeliest first
    top_logprobs: Tensor  # [t, num_top] float32


def finite(logits: Tensor) -> Tensor:
    """logits [n, V] of any float type -> a float32 copy in which NaN and -inf are -HUGE, and +inf is HUGE.

    A broken logit is one never chosen. Where all of a row are broken nothing can be right, but nothing may crash:
    token 0, which is never put as low as the others, is the choice then.
    """
    scores = torch.nan_to_num(logits.float(), nan=-HUGE, posinf=HUGE, neginf=-HUGE)
    scores[:, 0].clamp_(min=-HUGE / 2)
    return scores


def top_tokens(logprobs: Tensor, indices: list[int], lengths: list[int]) -> LikeliestTokens:
    """logprobs [m, V]: one line for each of `indices`."""
    vocab_size = logprobs.shape[1]
    bits = logprobs.view(torch.int32)
    # Negative floats are ordered against their bits: turn those around. Then the id breaks every tie.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    backwards = torch.arange(vocab_size - 1, -1, -1, device=logprobs.device)
    keys = (ordered.long() << 32) + backwards
    best = keys.topk(min(max(lengths), vocab_size), dim=-1).values
    token_ids = (vocab_size - 1) - (best & 0xFFFFFFFF)
    return LikeliestTokens(indices, lengths, token_ids, logprobs.gather(1, token_ids))


def prompt_scores(logits: Tensor, successors: Tensor, num_top: int = 0) -> PromptScores:
    """logits [t, V], successors [t]: the token that follows at each position."""
    ids, logprobs, top_logprobs = [], [], []
    for part, following in zip(
        torch.split(logits, _POSITIONS_AT_ONCE), torch.split(successors, _POSITIONS_AT_ONCE), strict=True
    ):
        scored = finite(part).log_softmax(-1)
        logprobs.append(scored.gather(1, following.unsqueeze(1)).squeeze(1))
        if num_top:
            top = top_tokens(scored, list(range(len(part))), [num_top] * len(part))
            ids.append(top.token_ids)
            top_logprobs.append(top.logprobs)
    return PromptScores(
        torch.cat(logprobs),
        torch.cat(ids) if ids else successors.new_empty(len(successors), 0),
        torch.cat(top_logprobs) if ids else logits.new_empty(len(successors), 0, dtype=torch.float32),
    )


def prompt_logprobs(logits: Tensor, successors: Tensor) -> Tensor:
    """Only the log probabilities of the successors."""
    return prompt_scores(logits, successors).logprobs
