"""The engine: rows to step, forward, sample. It runs the steps it is given and decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from legato.layers.kv_cache import KVCache
from legato.models.registry import CausalModel
from legato.pb import generate_pb2 as pb
from legato.sampling.logprobs import prompt_logprobs
from legato.sampling.params import SamplingParams
from legato.sampling.sampler import Sampled, Sampler
from legato.server.prepare import order, prepare
from legato.server.rows import Rows, RowStep

# Logits of a long prompt at once would be gigabytes.
PROMPT_LOGITS_TOKENS = 128


@dataclass(slots=True)
class Pending:
    """A step that was launched. `read` waits for it."""

    step_id: int
    started: int
    forward_ns: int
    sampled: Sampled | None
    # Place of each sampled row in the order of the request: the step computes decodes first.
    places: list[int]
    prompt_logprobs: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def read(self) -> pb.StepResponse:
        response = pb.StepResponse(id=self.step_id, forward_ns=self.forward_ns)
        if self.sampled is not None:
            ids, logprobs = self.sampled.token_ids.tolist(), self.sampled.logprobs.tolist()
            response.token_ids.extend([ids[place] for place in self.places])
            response.logprobs.extend([logprobs[place] for place in self.places])
            self._read_top(response)
        for row, pieces in self.prompt_logprobs.items():
            response.prompt_logprobs.add(row=row, logprobs=torch.cat(pieces).tolist())
        response.total_ns = time.perf_counter_ns() - self.started
        return response

    def _read_top(self, response: pb.StepResponse) -> None:
        top = self.sampled.top if self.sampled is not None else None
        if top is None:
            return
        ids, logprobs = top.token_ids.tolist(), top.logprobs.tolist()
        index_of = {place: index for index, place in enumerate(self.places)}
        for line, (place, length) in enumerate(zip(top.indices, top.lengths, strict=True)):
            response.top_tokens.add(
                index=index_of[place], ids=ids[line][:length], logprobs=logprobs[line][:length]
            )


class Engine:
    def __init__(
        self, model: CausalModel, cache: KVCache, max_rows: int, max_tokens: int, make_sampler: Callable[[int], Sampler]
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.layers[0].keys.device
        self.dtype = cache.layers[0].keys.dtype
        self.rows = Rows(max_rows, -(-max_tokens // cache.block_size), self.device)
        self.sampler = make_sampler(max_rows)

    @torch.inference_mode()
    def launch(self, request: pb.StepRequest) -> Pending:
        """Counts are booked first, for all rows: a step that fails later leaves no row behind the router's count."""
        started = time.perf_counter_ns()
        parts = self._book(request)
        for admission in request.admitted:
            self._configure_sampler(admission)
        places = order(parts)
        ordered = [parts[place] for place in places]
        step = prepare(self.rows, ordered, self.cache.block_size, self.dtype)
        hidden = self.model.forward(step, self.cache)
        sampled, sampled_parts = self._sample(hidden[step.logits_indices], ordered)
        logprobs = self._prompt_logprobs(hidden, ordered)
        return Pending(
            request.id, started, time.perf_counter_ns() - started, sampled, _restore(places, sampled_parts), logprobs
        )

    def _book(self, request: pb.StepRequest) -> list[RowStep]:
        for admission in request.admitted:
            self.rows.admit(
                admission.row,
                admission.request_id,
                list(admission.input_ids),
                admission.num_cached,
                admission.prompt_logprobs,
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

    def _sample(self, hidden: torch.Tensor, parts: list[RowStep]) -> tuple[Sampled | None, list[int]]:
        """One token for each row whose known tokens are all computed. Also their places in `parts`."""
        places = [place for place, part in enumerate(parts) if part.samples]
        if not places:
            return None, places
        rows = [parts[place].row for place in places]
        sampled = self.sampler.sample(self.model.logits(hidden), rows)
        self.rows.last_tokens[torch.tensor(rows, device=self.device)] = sampled.token_ids
        return sampled, places

    def _prompt_logprobs(self, hidden: torch.Tensor, parts: list[RowStep]) -> dict[int, list[torch.Tensor]]:
        wanted: dict[int, list[torch.Tensor]] = {}
        first = 0
        for part in parts:
            sequence = self.rows[part.row]
            last = min(part.start + part.count, len(sequence.input_ids) - 1)
            if sequence.prompt_logprobs and part.start < last:
                successors = torch.from_numpy(sequence.input_ids[part.start + 1 : last + 1]).to(self.device)
                states = hidden[first : first + last - part.start]
                wanted[part.row] = [
                    prompt_logprobs(self.model.logits(state), successor)
                    for state, successor in zip(
                        states.split(PROMPT_LOGITS_TOKENS), successors.split(PROMPT_LOGITS_TOKENS), strict=True
                    )
                ]
            first += part.count
        return wanted


def _restore(places: list[int], sampled_parts: list[int]) -> list[int]:
    """For each sampled row, in the order of the request: its index among the sampled ones of the ordered step."""
    original = [(places[part], index) for index, part in enumerate(sampled_parts)]
    return [index for _, index in sorted(original)]
