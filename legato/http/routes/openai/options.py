"""The fields that both routes share, checked: what a request asks for, whatever its prompt is.

Differences to the native API, all of them OpenAI's way: sampling is on unless the temperature is 0, a `top_p` of 0 or 1
is fine, `top_k` may be off in so many words, a seed may be negative and goes together with several answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from legato.api.errors import InvalidRequest
from legato.api.openai.requests import SharedFields
from legato.common.identity import random_seed
from legato.grammar.kinds import Grammar
from legato.grammar.wire import grammar_type
from legato.http.checks import as_float32, check_bias, check_priority, penalty, positive, probability, share
from legato.http.shapes import read_grammar
from legato.http.validation import Validator, ValidRequest
from legato.pb import generate_pb2 as pb
from legato.scheduling.adapters import AdapterInfo

# Answers to one prompt. TGI has no flag for it; `--max-best-of` is for those that are thrown away.
MAX_CHOICES = 8
MAX_TOP_LOGPROBS = 20
_SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class SharedOptions:
    grammar: Grammar | None
    # What the client calls it.
    grammar_field: str
    # Special tokens whose names are part of the text.
    spoken_token_ids: frozenset[int] = field(default=frozenset(), kw_only=True)
    parameters: pb.NextTokenChooserParameters
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    # Answers to return for each prompt, and to generate.
    n: int
    best_of: int
    include_usage: bool
    continuous_usage: bool
    priority: int
    adapter: AdapterInfo | None

    def seed_of(self, number: int) -> int:
        """Of the nth sequence of a prompt: the same whatever other prompts there are."""
        return random_seed() if self.seed is None else (self.seed + number) % _SEEDS

    def request(
        self, text: str, ids: list[int], max_new_tokens: int, top_logprobs: int | None, *, prompt_logprobs: bool = False
    ) -> ValidRequest:
        return ValidRequest(
            inputs=text,
            input_ids=ids,
            max_new_tokens=max_new_tokens,
            parameters=self.parameters,
            top_n_tokens=top_logprobs or 0,
            prompt_logprobs=prompt_logprobs,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop=False,
            spoken_token_ids=self.spoken_token_ids,
            priority=self.priority,
            adapter=self.adapter,
        )

    async def check_grammar(self, validator: Validator) -> None:
        """Before any of the requests is scheduled; they share the parameters."""
        if self.grammar is not None:
            checked = await validator.check_grammar(self.grammar, self.grammar_field)
            self.parameters.grammar = checked.value
            self.parameters.grammar_type = grammar_type(checked)


def shared_options(
    request: SharedFields, validator: Validator, best_of: int | None = None, calls: Grammar | None = None
) -> SharedOptions:
    """`calls` is what the text must look like if tools are to be called."""
    grammar = grammar_of(request.response_format) if calls is None else calls
    n, best_of = _sequences(request, best_of, validator.settings.max_best_of)
    validator.check_token_ids("stop_token_ids", request.stop_token_ids or ())
    validator.check_token_ids("logit_bias", request.logit_bias or ())
    check_bias(request.logit_bias or {})
    options = request.stream_options
    include_usage = bool(options and options.include_usage)
    return SharedOptions(
        grammar=grammar,
        grammar_field="response_format" if calls is None else "tools",
        parameters=_parameters(request, validator),
        seed=_seed(request.seed),
        stop=_stop(request.stop, validator.settings.max_stop_sequences),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        n=n,
        best_of=best_of,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        priority=check_priority(request.priority),
        adapter=validator.adapter_of_model(request.model),
    )


def grammar_of(response_format: object) -> Grammar | None:
    """What the text must look like, in OpenAI's and TGI's shapes. None: any text will do."""
    return read_grammar(response_format, "response_format")


def top_logprobs(name: str, wanted: int | None) -> int | None:
    if wanted is not None and not 0 <= wanted <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"`{name}` must be >= 0 and <= {MAX_TOP_LOGPROBS}. Given: {wanted}", name)
    return wanted


def _sequences(request: SharedFields, best_of: int | None, max_best_of: int) -> tuple[int, int]:
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"`n` must be >= 1 and <= {MAX_CHOICES}. Given: {n}", "n")
    if best_of is None:
        return n, n
    maximum = max(n, max_best_of)
    if not n <= best_of <= maximum:
        limit = f">= `n`, which is {n}, and <= {maximum} (--max-best-of)"
        raise InvalidRequest(f"`best_of` must be {limit}. Given: {best_of}", "best_of")
    if request.stream and best_of > n:
        raise InvalidRequest("`best_of` must equal `n` when streaming: the best are known only at the end", "best_of")
    return n, best_of


def _parameters(request: SharedFields, validator: Validator) -> pb.NextTokenChooserParameters:
    temperature = 1.0 if request.temperature is None else request.temperature
    if temperature < 0:
        raise InvalidRequest("`temperature` must be >= 0.0", "temperature")
    top_k = request.top_k or 0
    if not -1 <= top_k < 2**31:
        raise InvalidRequest(f"`top_k` must be >= -1 and < {2**31}. Given: {top_k}", "top_k")
    # What is zero for a shard is the most likely token, as in OpenAI's API; so is the smallest share of the mass.
    top_p = request.top_p
    greedy = as_float32("temperature", temperature) == 0
    greedy = greedy or (top_p is not None and top_p >= 0 and as_float32("top_p", top_p) == 0)
    parameters = pb.NextTokenChooserParameters(
        do_sample=not greedy,
        temperature=1.0 if greedy else temperature,
        top_k=max(top_k, 0),
        top_p=1.0 if greedy else share("top_p", top_p),
        typical_p=share("typical_p", request.typical_p),
        min_p=probability("min_p", request.min_p),
        repetition_penalty=positive("repetition_penalty", request.repetition_penalty),
        frequency_penalty=penalty("frequency_penalty", request.frequency_penalty),
        presence_penalty=penalty("presence_penalty", request.presence_penalty),
        token_bias=request.logit_bias or {},
    )
    _set_minimum(parameters, request, validator)
    return parameters


def _set_minimum(parameters: pb.NextTokenChooserParameters, request: SharedFields, validator: Validator) -> None:
    if not request.min_tokens:
        return
    limits = validator.limits
    model_ends = frozenset() if request.ignore_eos else limits.eos_token_ids
    ends = {token_id for token_id in model_ends if token_id < limits.vocab_size}.union(request.stop_token_ids or ())
    parameters.min_new_tokens = request.min_tokens
    parameters.end_token_ids.extend(sorted(ends))


def _seed(seed: int | None) -> int | None:
    if seed is not None and not -(_SEEDS // 2) <= seed < _SEEDS:
        raise InvalidRequest(f"`seed` must be a 64-bit integer. Given: {seed}", "seed")
    return None if seed is None else seed % _SEEDS


def _stop(stop: str | list[str] | None, maximum: int) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > maximum:
        raise InvalidRequest(f"`stop` supports up to {maximum} stop sequences. Given: {len(stops)}", "stop")
    return stops
