"""The prompts of a completion: a text, the ids of its tokens, or several of either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from legato.api.errors import InvalidRequest
from legato.api.openai.requests import CompletionRequest
from legato.http.routes.openai.errors import unsupported
from legato.http.validation import Validator
from legato.text.detokenize import Vocabulary
from legato.text.infill import InfillFormat

RawPrompt = str | list[int]


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    text: str
    ids: list[int]
    # Where each token begins in the text, in characters. Only where the answer needs it.
    offsets: list[int]


def raw_prompts(request: CompletionRequest, max_batch_size: int) -> list[RawPrompt]:
    """One entry per prompt, each of them a text or token ids."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("`prompt` must not be an empty list", "prompt")
    if _are_ids(given):
        return [given]
    if len(given) > max_batch_size:
        raise InvalidRequest(
            f"`prompt` holds {len(given)} prompts; this server takes up to {max_batch_size} at once "
            "(--max-client-batch-size)",
            "prompt",
        )
    prompts = [prompt for prompt in given if not isinstance(prompt, int)]
    if len(prompts) < len(given) or len({type(prompt) for prompt in prompts}) > 1:
        raise InvalidRequest("`prompt` must hold texts, token ids or lists of token ids, not a mixture", "prompt")
    return prompts


def with_suffix(prompts: list[RawPrompt], request: CompletionRequest, infill: InfillFormat | None) -> list[RawPrompt]:
    """The prompts that make a model write what stands between each of them and the request's `suffix`."""
    if not request.suffix:
        return prompts
    if infill is None:
        raise unsupported("suffix", "this model's vocabulary has no tokens for filling in the middle")
    if request.echo:
        raise InvalidRequest("`echo` is not supported together with `suffix`", "echo")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise InvalidRequest("`prompt` must be a text, or a list of texts, together with `suffix`", "prompt")
    return [infill.prompt(text, request.suffix) for text in texts]


def _are_ids(given: list[str | int | list[int]]) -> TypeGuard[list[int]]:
    return all(isinstance(item, int) for item in given)


async def read_prompt(
    raw: RawPrompt, validator: Validator, vocabulary: Vocabulary, *, echoed: bool
) -> CompletionPrompt:
    """`echoed`: its text and the places of its tokens will be asked for, and are worth computing."""
    if isinstance(raw, str):
        prompt = await _from_text(raw, validator, with_offsets=echoed)
    else:
        validator.max_new_tokens(len(raw), None)  # first, because it is cheap
        validator.check_token_ids("prompt", raw)
        prompt = _from_ids(raw, vocabulary) if echoed else CompletionPrompt("", raw, [])
    if not raw or not prompt.ids:
        raise InvalidRequest("`prompt` cannot be empty", "prompt")
    return prompt


async def _from_text(text: str, validator: Validator, *, with_offsets: bool) -> CompletionPrompt:
    if not with_offsets:
        return CompletionPrompt(text, await validator.input_ids(text), [])
    encoding = await validator.in_thread(lambda: validator.encode(text, with_offsets=True))
    return CompletionPrompt(text, encoding.ids, [start for start, _ in encoding.offsets])


def _from_ids(ids: list[int], vocabulary: Vocabulary) -> CompletionPrompt:
    """Special tokens appear by name: who sends them as ids wants to see them again."""
    detokenizer = vocabulary.detokenizer()
    texts, offsets, size = [], [], 0
    for token_id in ids:
        text = vocabulary.special.get(token_id) or detokenizer.push(token_id)
        offsets.append(size)
        texts.append(text)
        size += len(text)
    texts.append(detokenizer.flush())
    return CompletionPrompt("".join(texts), ids, offsets)
