"""Clients: what they ask for, what they must get, and which errors they have to accept."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cached_property

from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.wire import from_pb, grammar_type
from legato.pb import generate_pb2 as pb
from legato.scheduling.limits import MAX_LOSSES, Refusal
from legato.scheduling.retry import LONGEST_WAIT
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from tests.simulation.model import EOS, VOCAB, ExpectedText, top_tokens
from tests.simulation.scenario import LONGEST, Scenario
from tests.simulation.shard import seed_of


class Client:
    """One request. `receive` gets every output and compares it with what must come."""

    def __init__(self, request: GenerationRequest, scenario: Scenario) -> None:
        self.request = request
        self.submitted_at = math.inf  # when the router had it
        # Called when it has ended, or has cancelled, or its worker is gone.
        self.on_end: Callable[[int], None] = lambda _: None
        self.is_waiting = True
        self.is_cancelled = False  # and the router knows
        self.num_tokens = 0
        self.error: str | None = None
        # Errors that it may get: those that the shards reported for it, and reasons to refuse it.
        self.explained: set[str] = set()
        # Losses of the shards in a row, and the tokens it had then.
        self.num_losses = 0
        self.lost_at = -1
        # Called with the number of tokens so far; None: never.
        self.cancel_after: int | None = None
        self.cancel: Callable[[], None] = lambda: None
        self._scenario = scenario
        self._num_top = pb.Admission.FromString(request.payload).top_n_tokens

    @cached_property
    def _expected(self) -> ExpectedText:
        request, limits = self.request, self._scenario.limits
        start = limits.decoder_start_token_id
        prompt = request.input_ids if start is None else [*request.input_ids, start]
        return ExpectedText(prompt, seed_of(request.payload), limits.block_size)

    def end(self, error: str | None = None) -> None:
        self.is_waiting, self.error = False, error
        self.on_end(self.request.id)

    def receive(self, output: Output) -> None:
        assert self.is_waiting, f"request {self.request.id} got something after its end"
        if output.error is not None:
            self.end(output.error)
            return
        token, logprob = self._expected.next()
        assert output.token_id == token and output.logprob == logprob, (
            f"request {self.request.id} got token {output.token_id} in place {self.num_tokens}, expected {token}"
        )
        if self._num_top:
            assert output.top_tokens == top_tokens((token, logprob), self._num_top), "top tokens of another row"
        self.num_tokens += 1
        if self.num_tokens == 1 or output.prompt_logprobs is not None:
            self._check_prompt(output)
        reason = self._finish_reason(token)
        assert output.finish_reason is reason, f"finish reason {output.finish_reason}, expected {reason}"
        if reason is not None:
            self.end()
        elif self.num_tokens == self.cancel_after:
            self.cancel()

    def _check_prompt(self, output: Output) -> None:
        """Comes with the first token and never again."""
        wanted = self._expected.prompt_logprobs if self.request.prompt_logprobs and self.num_tokens == 1 else None
        assert output.prompt_logprobs == wanted, f"logprobs of the prompt: {output.prompt_logprobs}, expected {wanted}"
        if wanted is not None and self._num_top:
            top = [None, *(top_tokens((0, logprob), self._num_top) for logprob in wanted if logprob is not None)]
            assert output.prompt_top_tokens == (top if len(wanted) > 1 else None), "top tokens of the prompt"

    def _finish_reason(self, token: int) -> FinishReason | None:
        request = self.request
        if self.num_tokens > request.min_new_tokens:
            if token in EOS and not request.ignore_eos:
                return FinishReason.EOS_TOKEN
            if token in request.stop_token_ids:
                return FinishReason.STOP_SEQUENCE
        return FinishReason.LENGTH if self.num_tokens >= request.max_new_tokens else None

    def check_error(self, output: Output, now: float, has_shrunk: bool, lost: str | None) -> None:
        """Every error has a cause."""
        limits, error = self._scenario.limits, output.error
        assert error is not None
        if output.timed_out:
            waited, ran = limits.queue_timeout, limits.request_timeout
            timeouts = {Refusal.WAITED_TOO_LONG.format(waited): waited, Refusal.RAN_TOO_LONG.format(ran): ran}
            assert 0 < timeouts[error] <= now - self.submitted_at + 1e-6, f"{error} after {now - self.submitted_at:g} s"
            return
        if error == Refusal.OVERLOADED:
            assert 1 <= output.retry_after <= LONGEST_WAIT
        is_explained = error in self.explained or error == lost or (has_shrunk and error == Refusal.DOES_NOT_FIT)
        too_often = self.num_losses > MAX_LOSSES and error == Refusal.LOST_TOO_OFTEN.format(self.num_losses)
        assert is_explained or too_often, f"request {self.request.id} failed without a cause: {error}"


def draw_request(rng: random.Random, request_id: int, scenario: Scenario) -> GenerationRequest:
    has_encoder = scenario.limits.decoder_start_token_id is not None
    prompt_len = rng.randint(1, LONGEST // 2)
    letters = scenario.letters
    prompt = rng.choices(range(letters), k=prompt_len)
    if rng.random() < 0.5:  # begins like many others
        head = prompt_len * 3 // 4
        prompt[:head] = [letters - 1] * head
    parameters = pb.NextTokenChooserParameters(seed=rng.randrange(4))
    if rng.random() < 0.1:
        grammar = Grammar(GrammarKind.REGEX, f"a{{{rng.randrange(3)}}}")
        parameters.grammar, parameters.grammar_type = grammar.value, grammar_type(grammar)
    num_top = rng.choice((0, 0, 0, 0, 2))
    return GenerationRequest(
        id=request_id,
        input_ids=prompt,
        max_new_tokens=max(1, math.ceil((LONGEST - prompt_len) * rng.choice((0.0, 1.0, rng.random())))),
        payload=pb.Admission(parameters=parameters, top_n_tokens=num_top).SerializeToString(),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 2)) if rng.random() < 0.2 else frozenset(),
        min_new_tokens=rng.choice((0, 0, 0, 10)),
        prompt_logprobs=not has_encoder and rng.random() < 0.15,
        priority=rng.choice((0, 5, 5, 5, 9)),
        tenant=rng.choice(scenario.tenants),
    )


def grammar_of(request: GenerationRequest) -> Grammar | None:
    return from_pb(pb.Admission.FromString(request.payload).parameters)
