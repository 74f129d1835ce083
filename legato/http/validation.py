"""Validates requests before they use resources. Order and wording of the checks are TGI's.

Where we differ: `top_p` and `typical_p` of 1.0 mean "off" instead of an error, an unknown adapter is an error instead
of the base model, and numbers that a float32 cannot hold are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from legato.api.errors import InvalidRequest, TooLong, UnknownAdapterId, UnknownModel
from legato.api.native import GenerateParameters, GenerateRequest, SimpleToken
from legato.common.identity import random_seed
from legato.grammar.kinds import Grammar
from legato.grammar.wire import grammar_type
from legato.http.checks import check_bias, check_priority, penalty, positive, probability, share
from legato.http.concurrency import LONG_BODY
from legato.http.grammar import GrammarCompiler
from legato.http.shapes import read_grammar
from legato.ipc.settings import RouterSettings
from legato.pb import generate_pb2 as pb
from legato.scheduling.adapters import NO_ADAPTER, AdapterInfo
from legato.scheduling.state import DEFAULT_PRIORITY, GenerationRequest, ModelLimits
from legato.text.galactica import SequenceSplitter, without_markers
from legato.vision.prompts import Images, PromptImage, refuse_images, with_cache_keys

T = TypeVar("T")

# TGI reserved memory for this many tokens at a time, and checked only the first portion against the total. So it took
# requests that ask for more than fits; they end at the limit.
TGI_PORTION = 1024
# An absent `parameters` object samples, an empty one does not.
_NO_PARAMETERS = GenerateParameters(do_sample=True)
# Characters that are tokenized in less time than it takes to reach a thread and come back.
_SHORT = 256
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that can be served, and how its client wants the answer."""

    inputs: str
    input_ids: list[int]
    max_new_tokens: int
    # What the shards will read, as the contract has it. Every sequence of the request gets a seed of its own.
    parameters: pb.NextTokenChooserParameters
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    # Whether the text ends with the stop string that ended it.
    include_stop: bool = True
    # Special tokens whose names are part of the text.
    spoken_token_ids: frozenset[int] = frozenset()
    images: tuple[PromptImage, ...] = ()
    priority: int = DEFAULT_PRIORITY
    adapter: AdapterInfo | None = None

    def generation(
        self, request_id: int, seed: int, tenant: str = "", priority: int | None = None
    ) -> GenerationRequest:
        """One sequence, as the scheduler admits it. Without `priority`, with the one that was asked for."""
        parameters = pb.NextTokenChooserParameters()
        parameters.CopyFrom(self.parameters)
        parameters.seed = seed
        payload = pb.Admission(
            parameters=parameters,
            top_n_tokens=self.top_n_tokens,
            images=[
                pb.AdmittedImage(
                    image=pb.Image(data=image.data, mimetype=image.mimetype),
                    start=image.span.start,
                    num_tokens=image.span.num_tokens,
                )
                for image in self.images
            ],
        )
        return GenerationRequest(
            id=request_id,
            input_ids=with_cache_keys(self.input_ids, self.images),
            max_new_tokens=self.max_new_tokens,
            payload=payload.SerializeToString(),
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            min_new_tokens=self.parameters.min_new_tokens,
            prompt_logprobs=self.prompt_logprobs,
            images=tuple(image.span for image in self.images),
            priority=self.priority if priority is None else priority,
            tenant=tenant,
            adapter=NO_ADAPTER if self.adapter is None else self.adapter.number,
            has_grammar=bool(self.parameters.grammar),
        )

    def with_grammar(self, grammar: Grammar) -> ValidRequest:
        """`grammar` was checked."""
        self.parameters.grammar = grammar.value
        self.parameters.grammar_type = grammar_type(grammar)
        return self


class Validator:
    """Checks parameters on the event loop and tokenizes in threads of its own."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        settings: RouterSettings,
        prepare: Callable[[Grammar], Awaitable[None]] | None = None,
        images: Images | None = None,
        adapters: Callable[[], Mapping[str, AdapterInfo]] = dict,
    ) -> None:
        """`prepare` has the shards compile a grammar, if there are any; `images`: the model has a vision encoder;
        `adapters` returns those that are loaded, by name."""
        # A tokenizer file may say how to cut and pad training data. Requests are cut on demand and never padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._splitter = SequenceSplitter(tokenizer)
        self.limits = limits
        self.settings = settings
        self._has_foreign_tokens = max(tokenizer.get_vocab().values(), default=0) >= limits.vocab_size
        self.images = images
        self._adapters = adapters
        self._grammars = GrammarCompiler(tokenizer, limits, settings, prepare)
        self._threads = ThreadPoolExecutor(settings.validation_workers, thread_name_prefix="tokenize")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_thread.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()
        if self.images is not None:
            self.images.close()

    def num_sequences(self, parameters: GenerateParameters | None, *, streaming: bool) -> int:
        """How many permits the request takes. Checked before anything else, because permits are."""
        parameters = parameters or _NO_PARAMETERS
        best_of = 1 if parameters.best_of is None else parameters.best_of
        if streaming and best_of != 1:
            raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens")
        if streaming and parameters.decoder_input_details:
            raise InvalidRequest("`decoder_input_details` == true is not supported when streaming tokens")
        maximum = self.settings.max_best_of
        if best_of > 1 and maximum == 1:
            raise InvalidRequest("`best_of` != 1 is not allowed for this endpoint")
        if best_of > maximum:
            raise InvalidRequest(f"`best_of` must be > 0 and <= {maximum}. Given: {best_of}")
        return max(best_of, 1)

    async def validate(self, request: GenerateRequest, best_of: int = 1) -> ValidRequest:
        parameters = request.parameters or _NO_PARAMETERS
        chooser = _chooser(parameters, best_of)
        self._check_counts(parameters)
        chooser.seed = _seed(parameters, best_of)
        self._check_inputs(request.inputs, parameters)
        input_ids, images = await self._prompt(request.inputs, parameters)
        max_new_tokens = self.max_new_tokens(len(input_ids), parameters.max_new_tokens)
        self._check_extensions(parameters)
        chooser.token_bias.update(parameters.logit_bias or {})
        valid = ValidRequest(
            inputs=request.inputs,
            input_ids=input_ids,
            max_new_tokens=max_new_tokens,
            parameters=chooser,
            top_n_tokens=parameters.top_n_tokens or 0,
            prompt_logprobs=bool(parameters.decoder_input_details) and not images,
            ignore_eos=bool(parameters.ignore_eos),
            stop=tuple(parameters.stop or ()),
            images=images,
            priority=check_priority(parameters.priority),
            adapter=None if parameters.adapter_id is None else self.adapter(parameters.adapter_id),
        )
        grammar = read_grammar(parameters.grammar, "grammar")
        return valid if grammar is None else valid.with_grammar(await self.check_grammar(grammar, "grammar"))

    async def _prompt(self, inputs: str, parameters: GenerateParameters) -> tuple[list[int], tuple[PromptImage, ...]]:
        """The tokens, and the images among them for a model with a vision encoder."""
        images: tuple[PromptImage, ...] = ()
        if self.images is None:
            refuse_images(inputs)
            input_ids = await self.input_ids(inputs)
        else:
            inputs, sources = self.images.in_text(inputs)
            read = await self.images.read(sources, self.limits.max_input_tokens)
            special = self.images.rules.adds_special_tokens
            input_ids, images = self.images.place(await self.input_ids(inputs, add_special_tokens=special), read)
        if not input_ids:
            raise InvalidRequest("`inputs` cannot be empty")
        if parameters.truncate is not None and len(input_ids) > parameters.truncate:
            if images:
                raise InvalidRequest("`truncate` cannot be used for `inputs` with images")
            input_ids = input_ids[-parameters.truncate :]
        return input_ids, images

    async def check_grammar(self, grammar: Grammar, field: str) -> Grammar:
        """The grammar to follow; `field` is what the client calls it."""
        return await self._grammars.check(grammar, field)

    async def tokenize(self, inputs: str) -> list[SimpleToken]:
        """An image of a vision model counts as its tokens; offsets are those in the text with placeholders."""
        if self.images is None or not self.images.in_text(inputs)[1]:
            return await self.in_thread(lambda: self.offsets(inputs), len(inputs))
        text, sources = self.images.in_text(inputs)
        images = await self.images.read(sources, self.limits.max_input_tokens)
        special = self.images.rules.adds_special_tokens
        tokens = await self.in_thread(lambda: self.offsets(text, add_special_tokens=special), len(text))
        return self.images.repeated(tokens, images)

    def offsets(self, inputs: str, *, add_special_tokens: bool = True) -> list[SimpleToken]:
        """The tokens of a text, and where they are in it."""
        encoding = self.encode(inputs, with_offsets=True, add_special_tokens=add_special_tokens)
        marked, offsets = self._splitter.marked(inputs), encoding.offsets
        if marked != inputs:
            places = without_markers(marked)
            offsets = [(places[start], places[stop]) for start, stop in offsets]
        return token_offsets(encoding.ids, offsets, inputs)

    async def input_ids(self, inputs: str, *, add_special_tokens: bool = True) -> list[int]:
        """Empty for text that the tokenizer's normalizer removes completely."""
        if len(inputs) <= _SHORT:
            ids: list[int] = self.encode(inputs, add_special_tokens=add_special_tokens).ids
        else:
            ids = await self.in_thread(lambda: self._ids_of_long(inputs, add_special_tokens), len(inputs))
        return ids

    def _ids_of_long(self, inputs: str, add_special_tokens: bool) -> list[int]:
        encoding = self.encode(inputs, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        # Making this list and ending the encoding both keep the interpreter lock, for tenths of a second where there
        # are millions of tokens: streams get their turn in between.
        time.sleep(0)
        return ids

    async def in_thread(self, work: Callable[[], T], size: int = 0) -> T:
        """`size` is that of the text. Long ones have a thread of their own: short ones never wait for them, and the
        memory that tokenizing takes is not taken, and kept, by every thread."""
        threads = self._threads if size < LONG_BODY else self._long_thread
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def encode(self, inputs: str, *, with_offsets: bool = False, add_special_tokens: bool = True) -> Encoding:
        # The batch calls release the interpreter lock, the plain one does not: a long text would stop every stream.
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        try:
            encoding: Encoding = encode([self._splitter.marked(inputs)], add_special_tokens=add_special_tokens)[0]
        except BaseException as error:  # a panic inside the tokenizer is not an Exception
            raise InvalidRequest(f"tokenizer error {error}") from error
        if self._has_foreign_tokens:
            self._check_known(encoding.ids)
        return encoding

    def _check_known(self, ids: list[int]) -> None:
        """A tokenizer may have tokens that were added after the model was made: they would fail the whole step."""
        known = None if self.images is None else self.images.rules.token_id  # never generated, but embedded
        strangers = [token_id for token_id in ids if token_id >= self.limits.vocab_size and token_id != known]
        if strangers:
            token = self._tokenizer.id_to_token(strangers[0])
            raise InvalidRequest(
                f"`inputs` holds {token!r}, a token of the tokenizer that is not in the model's vocabulary"
            )

    def _check_counts(self, parameters: GenerateParameters) -> None:
        if parameters.max_new_tokens == 0:
            raise InvalidRequest("`max_new_tokens` must be strictly positive")
        maximum, given = self.settings.max_stop_sequences, len(parameters.stop or ())
        if given > maximum:
            raise InvalidRequest(f"`stop` supports up to {maximum} stop sequences. Given: {given}")

    def _check_inputs(self, inputs: str, parameters: GenerateParameters) -> None:
        maximum, given = self.settings.max_top_n_tokens, parameters.top_n_tokens or 0
        if given > maximum:
            raise InvalidRequest(f"`top_n_tokens` must be >= 0 and <= {maximum}. Given: {given}")
        if not inputs:
            raise InvalidRequest("`inputs` cannot be empty")
        maximum, truncate = self.limits.max_input_tokens, parameters.truncate
        if truncate is not None and not 0 < truncate <= maximum:
            raise InvalidRequest(f"`truncate` must be strictly positive and less than {maximum}. Given: {truncate}")

    def max_new_tokens(self, input_len: int, wanted: int | None) -> int:
        """As many as wanted and as fit."""
        limits = self.limits
        room = max(limits.max_total_tokens - input_len, 0)
        portion = min(room if wanted is None else wanted, TGI_PORTION)
        if input_len + portion > limits.max_total_tokens:
            raise TooLong(
                f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
                f"Given: {input_len} `inputs` tokens and {portion} `max_new_tokens`",
                limit=limits.max_total_tokens,
                input_len=input_len,
                max_new_tokens=portion,
            )
        if input_len > limits.max_input_tokens:
            raise TooLong(
                f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {input_len}",
                limit=limits.max_input_tokens,
                input_len=input_len,
            )
        return room if wanted is None else min(wanted, room)

    def _check_extensions(self, parameters: GenerateParameters) -> None:
        if parameters.adapter_id is not None:
            self.adapter(parameters.adapter_id)
        self.check_token_ids("logit_bias", parameters.logit_bias or ())
        check_bias(parameters.logit_bias or {})

    def adapter(self, name: str) -> AdapterInfo:
        """UnknownAdapterId."""
        found = self._adapters().get(name)
        if found is None:
            raise UnknownAdapterId(name)
        return found

    def adapter_of_model(self, model: str | None) -> AdapterInfo | None:
        """What `model` means in OpenAI's API: the base model or an adapter. A server that takes no adapters answers to
        any name, like TGI's; one that does must not let the base model answer for an adapter that is not there."""
        if model is None or model in self.settings.base_names:
            return None
        found = self._adapters().get(model)
        if found is None and self.settings.takes_adapters:
            raise UnknownModel(model)
        return found

    def check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.limits.vocab_size:
                raise InvalidRequest(
                    f"`{name}` must have token ids >= 0 and < {self.limits.vocab_size}. Given: {token_id}", name
                )


def _chooser(parameters: GenerateParameters, best_of: int) -> pb.NextTokenChooserParameters:
    """The sampling parameters, without the seed."""
    warpers = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.typical_p, parameters.min_p)
    if best_of > 1 and not parameters.do_sample and all(warper is None for warper in warpers):
        raise InvalidRequest("you must use sampling when `best_of` is > 1")
    temperature = positive("temperature", parameters.temperature)
    repetition_penalty = positive("repetition_penalty", parameters.repetition_penalty)
    frequency_penalty = penalty("frequency_penalty", parameters.frequency_penalty)
    presence_penalty = penalty("presence_penalty", parameters.presence_penalty)
    top_p = share("top_p", parameters.top_p)
    typical_p = share("typical_p", parameters.typical_p)
    min_p = probability("min_p", parameters.min_p)
    if parameters.top_k is not None and parameters.top_k <= 0:
        raise InvalidRequest("`top_k` must be strictly positive")
    top_k = parameters.top_k or 0
    return pb.NextTokenChooserParameters(
        # A filter implies sampling, unless it has its neutral value.
        do_sample=bool(parameters.do_sample)
        or best_of > 1
        or (temperature, top_k, top_p, typical_p, min_p) != (1.0, 0, 1.0, 1.0, 0.0),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        typical_p=typical_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        watermark=bool(parameters.watermark),
    )


def _seed(parameters: GenerateParameters, best_of: int) -> int:
    if parameters.seed is None:
        return random_seed()
    if best_of > 1:
        raise InvalidRequest("`seed` must not be set when `best_of` > 1")
    if not 0 <= parameters.seed <= _MAX_SEED:
        raise InvalidRequest(f"`seed` must be >= 0 and <= {_MAX_SEED}. Given: {parameters.seed}")
    return parameters.seed


def token_offsets(ids: list[int], offsets: list[tuple[int, int]], text: str) -> list[SimpleToken]:
    """Where tokens are in a text, in bytes of its UTF-8. Tokens that share a character have all of it; special tokens
    that were added have nothing."""
    byte_at: Sequence[int]
    if text.isascii():
        byte_at = range(len(text) + 1)
    else:
        byte_at = [0, *accumulate(len(character.encode()) for character in text)]
    return [
        SimpleToken(id=token_id, text=text[start:stop], start=byte_at[start], stop=byte_at[stop])
        for token_id, (start, stop) in zip(ids, offsets, strict=True)
    ]
