"""A chat between its request and its answer, whichever API it came through.

The request is always OpenAI's `ChatRequest`: the other APIs translate theirs into one. What they do with the parts of
the answer is up to the jobs that derive from this one.
"""

from __future__ import annotations

from dataclasses import replace

from legato.api.errors import InvalidRequest
from legato.api.openai.requests import ChatRequest
from legato.chat.answers import AnswerParser, ChatFormat, ReasoningWish
from legato.chat.reasoning.formats import Phase, ReasoningFormat
from legato.grammar.kinds import Grammar
from legato.http.inference import Inference
from legato.http.routes.openai.conversation import (
    check_conversation,
    continues,
    last_answer,
    read_conversation,
    reasoning_wish,
    tool_use,
)
from legato.http.routes.openai.options import SharedOptions, grammar_of, shared_options, top_logprobs
from legato.http.routes.openai.serving import OpenAIJob
from legato.http.validation import ValidRequest
from legato.pb import generate_pb2 as pb

# Tokens of an answer that reasoning leaves for what has to follow a grammar, if there are twice as many.
ROOM_FOR_GRAMMAR = 4096


class ConversationJob(OpenAIJob):
    prompt_only = False

    def __init__(
        self,
        request: ChatRequest,
        inference: Inference,
        format: ChatFormat,
        wish: ReasoningWish | None = None,
        text_grammar: Grammar | None = None,
    ) -> None:
        """Without `wish`, the request says how much the model may reason. `text_grammar` is what the text must look
        like instead of a call, where it stands for one."""
        check_conversation(request)
        self.request = request
        self.format = format
        self.inference = inference
        self._use = tool_use(request)
        self._text_grammar = text_grammar
        self._wish = reasoning_wish(request) if wish is None else wish
        super().__init__(self._options(), 1, inference.settings)
        self.num_top = _num_top(request)
        self._max_tokens = _max_tokens(request)
        # Known when the prompt is.
        self._phase = Phase.AFTER

    def _options(self) -> SharedOptions:
        request, validator, use = self.request, self.inference.validator, self._use
        spoken = self.format.spoken(use)
        if use is None:
            return replace(shared_options(request, validator), spoken_token_ids=spoken)
        calls = self._text_grammar
        if calls is None:
            answer = grammar_of(request.response_format)
            calls = self.format.tooling.grammar(use, answer, schema_lenient=validator.settings.schema_lenient)
        return replace(shared_options(request, validator, calls=calls), spoken_token_ids=spoken)

    async def requests(self) -> list[ValidRequest]:
        prompt = await read_conversation(self.request, self.inference, self.format, self._use, self._wish)
        validator = self.inference.validator
        room = validator.max_new_tokens(len(prompt.ids), self._max_tokens)
        await self.options.check_grammar(validator)
        valid = self.options.request(prompt.text, prompt.ids, room, self.num_top)
        reasoning = self.format.reasoning
        if reasoning is not None:
            continued = last_answer(self.request) if continues(self.request) else ""
            self._phase = reasoning.phase_after(prompt.text, continued)
            self._limit_reasoning(valid, reasoning)
        return [replace(valid, images=prompt.images)]

    def _limit_reasoning(self, valid: ValidRequest, reasoning: ReasoningFormat) -> None:
        """The shards end it when its budget is spent, and apply the grammar after it."""
        has_grammar = self.options.grammar is not None
        covered = self._text_grammar is None and self.format.describes_reasoning(self._use)
        if self._phase is Phase.AFTER or (has_grammar and covered):
            return
        budget = self.format.budget(self._wish)
        budget = self.inference.settings.reasoning_budget if budget is None else budget
        if has_grammar:
            most = valid.max_new_tokens - min(valid.max_new_tokens // 2, ROOM_FOR_GRAMMAR)
            budget = most if budget is None else min(budget, most)
        if budget is None:
            return
        encode = self.inference.tokenizer.encode
        opening, end = (
            encode(text, add_special_tokens=False).ids for text in (reasoning.openings[0], reasoning.forced_end)
        )
        starts = [] if self._phase is Phase.INSIDE else opening
        limits = pb.Reasoning(start_ids=starts, ends=reasoning.closings, forced_ids=end, budget=budget)
        valid.parameters.reasoning.CopyFrom(limits)

    def parser(self) -> AnswerParser | None:
        """For one answer. None: all of it is content."""
        return self.format.parser(None if self._text_grammar is not None else self._use, self._phase)

    def parser_of_all(self) -> AnswerParser:
        """For APIs whose answers have parts even if there is only one."""
        return self.parser() or AnswerParser(None, None)


def _num_top(request: ChatRequest) -> int | None:
    """None: no logprobs at all."""
    num_top = top_logprobs("top_logprobs", request.top_logprobs)
    if num_top and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    return num_top or 0 if request.logprobs else None


def _max_tokens(request: ChatRequest) -> int | None:
    for name, value in (
        ("max_completion_tokens", request.max_completion_tokens),
        ("max_tokens", request.max_tokens),
    ):
        if value == 0:
            raise InvalidRequest(f"`{name}` must be strictly positive", name)
        if value is not None:
            return value
    return None
