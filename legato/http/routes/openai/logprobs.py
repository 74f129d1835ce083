"""Logprobs in the shapes of the two routes.

They are the model's own: temperature, filters, penalties and biases do not change them. For the tokens of a prompt, top
logprobs are null where the shard gave none.
"""

from __future__ import annotations

from collections.abc import Iterable

from legato.api.openai.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from legato.http.routes.openai.prompts import CompletionPrompt
from legato.http.routes.openai.token_names import TokenNames
from legato.http.streams import Piece, Stream


def prompt_logprobs(prompt: CompletionPrompt, stream: Stream, num_top: int, names: TokenNames) -> CompletionLogprobs:
    """Those of an echoed prompt. Its first token has none."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=prompt.offsets)
    tops = stream.prompt_top_tokens or [None] * len(prompt.ids)
    for token_id, logprob, top in zip(prompt.ids, stream.prompt_logprobs, tops, strict=True):
        name = names.of(token_id).text
        known = logprob is not None and (top is not None or num_top == 0)
        result.tokens.append(name)
        result.token_logprobs.append(logprob)
        result.top_logprobs.append(_top(top or (), name, logprob, names) if known else None)
    return result


def completion_logprobs(pieces: Iterable[Piece], text_start: int, names: TokenNames) -> CompletionLogprobs:
    """Those of generated tokens; the generated text begins at `text_start`."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for piece in pieces:
        token = piece.token
        name = names.of(token.id).text
        result.tokens.append(name)
        result.token_logprobs.append(token.logprob)
        top = [(each.id, each.logprob) for each in piece.top_tokens]
        result.top_logprobs.append(_top(top, name, token.logprob, names))
        result.text_offset.append(text_start + piece.offset)
    return result


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _top(
    top: Iterable[tuple[int, float | None]], chosen: str, logprob: float | None, names: TokenNames
) -> dict[str, float]:
    """The likeliest come first, so of two tokens with one name the likelier counts."""
    result: dict[str, float] = {}
    for token_id, each in top:
        result.setdefault(names.of(token_id).text, each or 0.0)
    result.setdefault(chosen, logprob or 0.0)
    return result


def chat_logprobs(pieces: Iterable[Piece], names: TokenNames) -> ChatLogprobs:
    return ChatLogprobs(content=[_token(piece, names) for piece in pieces])


def _token(piece: Piece, names: TokenNames) -> TokenLogprob:
    name = names.of(piece.token.id)
    top = []
    for each in piece.top_tokens:
        other = names.of(each.id)
        top.append(TopLogprob(token=other.text, logprob=each.logprob or 0.0, bytes=other.bytes))
    return TokenLogprob(token=name.text, logprob=piece.token.logprob or 0.0, bytes=name.bytes, top_logprobs=top)
