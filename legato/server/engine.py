"""The engine: rows to step, forward, sample. It runs the steps it is given and decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from legato.grammar.wire import from_pb
from legato.layers.kv_cache import KVCache
from legato.models.registry import CausalModel
from legato.pb import generate_pb2 as pb
from legato.sampling.logprobs import PromptScores, TopTokens, prompt_scores
from legato.sampling.params import SamplingParams
from legato.sampling.sampler import Sampler
from legato.server.grammars import Grammars
from legato.server.graphs import DecodeGraphs
from legato.server.prepare import decodes_first, prepare
from legato.server.rows import Rows, RowStep, to_device

# Logits of a long prompt at once would be gigabytes.
PROMPT_LOGITS_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens of one step, on the device or on their way to the host."""

    rows: list[int]
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    top: TopTokens | None = None
    # Place -> why the token there means nothing.
    errors: dict[int, str] = field(default_factory=dict)

    def to_host(self) -> Chosen:
        """Queue the copies behind the step. Whoever reads them waits for the step's event first."""
        top = self.top
        if top is not None:
            top = replace(top, token_ids=_to_host(top.token_ids), logprobs=_to_host(top.logprobs))
        return replace(self, token_ids=_to_host(self.token_ids), logprobs=_to_host(self.logprobs), top=top)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step came to."""

    chosen: Chosen | None
    # Place of each sampled row in the order of the request: the step computes decodes first.
    places: list[int]
    # What the model thought of the prompts of the rows that asked.
    prompt_scores: dict[int, list[PromptScores]]


@dataclass(frozen=True, slots=True)
class Pending:
    """A step that was launched. `read` waits for it."""

    step_id: int
    started: int
    clock: StepClock
    outcome: Outcome

    def read(self) -> pb.StepResponse:
        response = pb.StepResponse(id=self.step_id, forward_ns=self.clock.wait())
        chosen, places = self.outcome.chosen, self.outcome.places
        if chosen is not None:
            ids, logprobs = chosen.token_ids.tolist(), chosen.logprobs.tolist()
            response.token_ids.extend([ids[place] for place in places])
            response.logprobs.extend([logprobs[place] for place in places])
            if chosen.top is not None:
                self._read_top(chosen.top, response)
            for place, message in chosen.errors.items():
                response.row_errors.add(index=places.index(place), message=message)
        for row, pieces in self.outcome.prompt_scores.items():
            response.prompt_logprobs.add(
                row=row,
                logprobs=torch.cat([piece.logprobs for piece in pieces]).tolist(),
                top_ids=torch.cat([piece.top_ids for piece in pieces]).flatten().tolist(),
                top_logprobs=torch.cat([piece.top_logprobs for piece in pieces]).flatten().tolist(),
            )
        response.total_ns = time.perf_counter_ns() - self.started
        return response

    def _read_top(self, top: TopTokens, response: pb.StepResponse) -> None:
        ids, logprobs = top.token_ids.tolist(), top.logprobs.tolist()
        index_of = {place: index for index, place in enumerate(self.outcome.places)}
        for line, (place, length) in enumerate(zip(top.indices, top.lengths, strict=True)):
            response.top_tokens.add(index=index_of[place], ids=ids[line][:length], logprobs=logprobs[line][:length])


class StepClock:
    """How long the device took for a step: events around it on a GPU, the host's clock where the host computes."""

    def __init__(self, device: torch.device) -> None:
        self._events = [_timed_event() for _ in range(2)] if device.type == "cuda" else []
        self._started = time.perf_counter_ns()
        if self._events:
            self._events[0].record()
        self._duration = 0

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        self._duration = time.perf_counter_ns() - self._started

    def wait(self) -> int:
        """Nanoseconds, once everything queued before `stop` is done."""
        if not self._events:
            return self._duration
        self._events[1].synchronize()
        return int(self._events[0].elapsed_time(self._events[1]) * 1e6)


class Engine:
    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        max_rows: int,
        max_tokens: int,
        make_sampler: Callable[[int], Sampler],
        grammars: Grammars,
        graph_sizes: tuple[int, ...] = (),  # of decode batches to capture; (0,) for none, () for whatever comes
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.layers[0].keys.device
        self.dtype = cache.layers[0].keys.dtype
        self.rows = Rows(max_rows, -(-max_tokens // cache.block_size), self.device)
        self.sampler = make_sampler(max_rows)
        self.grammars = grammars
        self.graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and graph_sizes != (0,):
            self.graphs = DecodeGraphs(model, cache, self.rows, graph_sizes)

    @torch.inference_mode()
    def launch(self, request: pb.StepRequest) -> Pending:
        """Counts are booked first, for all rows: a step that fails later leaves no row behind the router's count."""
        started = time.perf_counter_ns()
        parts = self._book(request)
        clock = StepClock(self.device)
        for admission in request.admitted:
            self._configure_sampler(admission)
        self.rows.write_blocks()
        if self._has_graph(parts):
            outcome = Outcome(self._replay(parts), list(range(len(parts))), {})
        else:
            outcome = self._forward(parts)
        if outcome.chosen is not None:
            outcome = replace(outcome, chosen=outcome.chosen.to_host())
        clock.stop()
        if outcome.chosen is not None:
            self.grammars.accept(outcome.chosen.rows, partial(_read_ids, clock, outcome.chosen))
        return Pending(request.id, started, clock, outcome)

    def _has_graph(self, parts: list[RowStep]) -> bool:
        if self.graphs is None or self.graphs.size_for(len(parts)) is None:
            return False
        return all(part.decode for part in parts)

    def _replay(self, parts: list[RowStep]) -> Chosen:
        """A step of decodes only."""
        assert self.graphs is not None
        rows = [part.row for part in parts]
        done = self.graphs.run(rows)
        if self.sampler.is_greedy(rows) and not self.grammars.active(rows):
            return Chosen(rows, done.token_ids[: len(rows)], done.logprobs[: len(rows)])
        return self._choose(done.logits[: len(rows)], rows)

    def _forward(self, parts: list[RowStep]) -> Outcome:
        """A step of any kind."""
        order = decodes_first(parts)
        ordered = [parts[place] for place in order]
        step = prepare(self.rows, ordered, self.cache.block_size, self.dtype)
        hidden = self.model.forward(step, self.cache)
        if self.graphs is not None:
            self.rows.lengths[step.rows] = step.context_lens
        sampled = [place for place, part in enumerate(ordered) if part.samples]
        chosen = None
        if sampled:
            logits = self.model.logits(hidden[step.logits_indices])
            chosen = self._choose(logits, [ordered[place].row for place in sampled])
        return Outcome(chosen, _restore(order, sampled), self._prompt_scores(hidden, ordered))

    def _choose(self, logits: torch.Tensor, rows: list[int]) -> Chosen:
        sampled = self.sampler.sample(logits, rows, self.grammars.allowed(rows))
        self.rows.last_tokens[to_device(np.array(rows), self.device)] = sampled.token_ids
        return Chosen(rows, sampled.token_ids, sampled.logprobs, sampled.top, self.grammars.errors(rows))

    def _book(self, request: pb.StepRequest) -> list[RowStep]:
        for admission in request.admitted:
            self.rows.admit(
                admission.row,
                admission.request_id,
                list(admission.input_ids),
                admission.num_cached,
                admission.prompt_logprobs,
                admission.top_n_tokens,
            )
            self.rows.append_blocks(admission.row, list(admission.blocks))
        parts, first = [], 0
        new_blocks = list(request.new_blocks)
        for row, count, num_new in zip(request.rows, request.num_tokens, request.num_new_blocks, strict=True):
            if num_new:
                self.rows.append_blocks(row, new_blocks[first : first + num_new])
                first += num_new
            parts.append(self.rows.advance(row, count))
        return parts

    def _configure_sampler(self, admission: pb.Admission) -> None:
        ids = list(admission.input_ids)
        num_prompt = len(ids) - admission.num_generated
        params = SamplingParams.from_pb(admission.parameters, admission.top_n_tokens)
        self.sampler.set_row(admission.row, params, ids[:num_prompt], ids[num_prompt:])
        self.grammars.set_row(admission.row, from_pb(admission.parameters), ids[num_prompt:])

    def _prompt_scores(self, hidden: torch.Tensor, parts: list[RowStep]) -> dict[int, list[PromptScores]]:
        wanted: dict[int, list[PromptScores]] = {}
        first = 0
        for part in parts:
            sequence = self.rows[part.row]
            last = min(part.start + part.count, len(sequence.input_ids) - 1)
            if sequence.prompt_logprobs and part.start < last:
                successors = torch.from_numpy(sequence.input_ids[part.start + 1 : last + 1]).to(self.device)
                states = hidden[first : first + last - part.start]
                wanted[part.row] = [
                    prompt_scores(self.model.logits(state), successor, sequence.num_top_tokens)
                    for state, successor in zip(_pieces(states), _pieces(successors), strict=True)
                ]
            first += part.count
        return wanted


def _restore(order: list[int], sampled: list[int]) -> list[int]:
    """For each sampled row, in the order of the request: its index among the sampled ones of the ordered step."""
    original = [(order[place], index) for index, place in enumerate(sampled)]
    return [index for _, index in sorted(original)]


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor, PROMPT_LOGITS_TOKENS)


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _read_ids(clock: StepClock, chosen: Chosen) -> list[int]:
    """The tokens of a step, once they are on the host."""
    clock.wait()
    ids: list[int] = chosen.token_ids.tolist()
    return ids


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
