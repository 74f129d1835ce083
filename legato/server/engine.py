"""The engine: from rows to a step, forward, sample. It runs the steps that it is given and schedules nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from legato.grammar.reasoning import RowReasoning
from legato.grammar.wire import from_pb
from legato.layers.kv_cache import KVCache
from legato.layers.lora import StepAdapters
from legato.layers.shard import Shard
from legato.models.registry import CausalModel, GreedyModel
from legato.models.speculators import Speculator
from legato.models.vision import CrossModel, GraphedTower, VisionModel
from legato.pb import generate_pb2 as pb
from legato.sampling.logprobs import PromptScores, prompt_scores
from legato.sampling.sampler import Sampler
from legato.scheduling.limits import most_sampled
from legato.server.adapters import ShardAdapters
from legato.server.grammars import Grammars
from legato.server.graphs.captures import mixed_sizes
from legato.server.graphs.decode import CudaRecorder, Record
from legato.server.graphs.steps import StepGraphs
from legato.server.memory.budget import is_out_of_memory, refused_for_memory, release
from legato.server.memory.offload import HostBlockStore
from legato.server.nodes.stage import PipelineStage
from legato.server.pending import ForwardResult, PendingStep, SampledTokens, StepClock
from legato.server.prepare import advance, decodes_first, halves, prepare
from legato.server.rows import Rows, RowStep, to_device
from legato.server.speculation.draft_model import NOT_GUESSED, DraftModel
from legato.server.speculation.guessers import Guesser
from legato.server.speculation.verification import verify, verify_at_once
from legato.server.vision.cross import CrossVisionEncoder
from legato.server.vision.images import VisionEncoder
from legato.server.vision.tower_graphs import TowerGraphs
from legato.vision.rules import ImageRules

logger = logging.getLogger(__name__)

# The logits of a long prompt all at once would be gigabytes.
PROMPT_LOGITS_TOKENS = 128
# How often a step that does not fit is split in two: after sixteen forwards of a sixteenth it fails.
MAX_SPLITS = 4


class Engine:
    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        max_rows: int,
        max_tokens: int,
        make_sampler: Callable[[int], Sampler],
        grammars: Grammars,
        graph_sizes: tuple[int, ...] = (),  # decode batch sizes to capture; (0,): none, (): every size that comes up
        shard: Shard | None = None,
        image_rules: ImageRules | None = None,  # how images are cut into tokens; None: text only
        speculator: Speculator | None = None,
        draft: Guesser | None = None,  # what guesses up to `drafts` tokens
        drafts: int = 0,  # that a decode may bring
        adapters: ShardAdapters | None = None,  # None: the shard takes none
        host_blocks: HostBlockStore | None = None,  # None: evicted prefixes are gone
        stage: PipelineStage | None = None,  # None: this shard has all layers
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.layers[0].keys.device
        self.dtype = model.kv_shape.dtype
        has_encoder = model.config.decoder_start_token_id is not None
        self.adapters = adapters
        self.host_blocks = host_blocks
        self.stage = stage
        on_device = None if adapters is None else adapters.device
        self.rows = Rows(max_rows, -(-max_tokens // cache.block_size), self.device, has_encoder, on_device)
        self.sampler = make_sampler(max_rows)
        self.grammars = grammars
        self.speculator = speculator
        self.draft_model: DraftModel | None = None
        if draft is not None and drafts:
            self.draft_model = DraftModel(draft, self.rows, self.sampler, cache, drafts)
        self.vision_encoder: VisionEncoder | None = None
        if image_rules is not None and isinstance(model, VisionModel):
            encoder = CrossVisionEncoder if isinstance(model, CrossModel) else VisionEncoder
            self.vision_encoder = encoder(model, image_rules, max_rows, self.device)
        self._num_proposals = 0  # that the step which is computed asks for
        self.shard = shard or Shard()
        # One shard of several must not split a step: the others would compute the whole. And where a state is kept,
        # what a failed forward had begun cannot be computed again.
        self._max_splits = 0 if not self.shard.is_alone or model.kv_shape.keeps_states else MAX_SPLITS
        is_fixed = not has_encoder and self.vision_encoder is None  # encoders of prompts and images have no fixed shape
        self._mixed_sizes = mixed_sizes(max_rows, drafts=drafts > 0) if is_fixed else []
        self._max_sampled = most_sampled(max_rows) if drafts else max_rows
        self._likeliest = model.likeliest if isinstance(model, GreedyModel) else None
        self.graphs: StepGraphs | None = None
        if self.device.type == "cuda" and graph_sizes != (0,):
            self.use_graphs(graph_sizes, CudaRecorder())

    def use_graphs(self, sizes: Sequence[int], record: Record, mixed: Sequence[int] | None = None) -> None:
        """From now on; nothing is captured yet. `mixed` are other sizes for steps with prompts."""
        mixed = self._mixed_sizes if mixed is None or not self._mixed_sizes else mixed
        self.graphs = StepGraphs(self.model, self.cache, self.rows, sizes, mixed, record, self.shard, self._max_sampled)
        for kind in self.graphs.kinds:
            kind.keeps_hidden = self.speculator is not None
        if (
            self.vision_encoder is not None
            and isinstance(self.model, GraphedTower)
            and isinstance(record, CudaRecorder)
        ):
            self.vision_encoder.graphs = TowerGraphs(record)

    @property
    def samples(self) -> bool:
        """Whether logits are computed here: in a pipeline, on the last stage only."""
        return self.stage is None or self.stage.is_last

    @property
    def caches(self) -> list[KVCache]:
        """All that the router's blocks are in."""
        return [self.cache] if self.draft_model is None else [self.cache, self.draft_model.cache]

    def forget_rows(self) -> None:
        """A new router comes: what its rows hold is up to its admissions."""
        self.rows.sequences = [None] * len(self.rows.sequences)
        self.grammars.forget_rows()

    def launch(self, request: pb.StepRequest) -> PendingStep:
        """Counts are advanced first, for all rows: a step that fails later leaves no row behind the router's count.

        A step that does not fit in memory raises `OutOfMemory`: its rows are lost, all others are unchanged.
        """
        started = time.perf_counter_ns()
        parts = advance(self.rows, request)
        lost = f"a step of {sum(request.num_tokens)} tokens in {len(request.rows)} rows does not fit"
        cure = "lower --cuda-memory-fraction, which leaves more room beside the KV cache, or --max-batch-prefill-tokens"
        with refused_for_memory(f"{lost}; {cure}", self.device):
            try:
                return self._launch(request, parts, started)
            except BaseException:
                self.rows.out_of_sync.update(request.rows)
                raise

    @torch.inference_mode()
    def _launch(self, request: pb.StepRequest, parts: list[RowStep], started: int) -> PendingStep:
        clock = StepClock(self.device)
        for admission in request.admitted:
            if self.samples:
                self._configure_sampler(admission)
        if self.vision_encoder is not None:
            self.vision_encoder.admit_all(request.admitted)
            parts = self.vision_encoder.keep_whole(parts)
        if self.adapters is not None:
            self.adapters.place(request.adapters)
        if self.host_blocks is not None:
            self.host_blocks.run(request, self.cache)
        self.rows.write_blocks()
        self._num_proposals = request.num_proposals
        if self.draft_model is not None:
            self.draft_model.begin(request)
            self.draft_model.note(parts)
        outcomes = self._replay(parts) or self._forward(parts)
        outcomes = [outcome.to_host() for outcome in outcomes]
        clock.stop()
        if self.vision_encoder is not None:
            self.vision_encoder.forget(parts)
        for outcome in outcomes:
            if outcome.chosen is not None and self.stage is not None:
                self.stage.return_tokens(outcome.chosen, clock.wait)
            if outcome.chosen is not None:
                self.grammars.accept(outcome.chosen.rows, partial(_read_ids, clock, outcome.chosen))
        return PendingStep(request.id, started, clock, outcomes)

    def _replay(self, parts: list[RowStep]) -> list[ForwardResult]:
        """Run the step with a CUDA graph, if one fits; else an empty list."""
        if self.graphs is None:
            return []
        order = decodes_first(parts)
        ordered = [parts[place] for place in order]
        done = self.graphs.run(ordered)
        if done is None:
            return []
        sampled = [place for place, part in enumerate(ordered) if part.samples]
        sampling = [ordered[place] for place in sampled]
        rows = [part.row for part in sampling]
        count = sum(part.num_sampled for part in sampling)
        if not rows:
            chosen = None
        elif self.sampler.is_greedy(rows) and not self.grammars.active(rows):
            chosen = SampledTokens(rows, done.token_ids[:count], done.logprobs[:count])
            if count > len(rows):
                chosen = self._accept(sampling, verify_at_once(chosen, sampling))
        else:
            chosen = self._choose_all(done.logits[:count], sampling)
        if chosen is not None:
            chosen = self._propose(done.hidden, sampling, chosen)
        return [ForwardResult(chosen, _restore(order, sampled), {})]

    def _forward(self, parts: list[RowStep], splits: int = 0) -> list[ForwardResult]:
        """Run the step eagerly: one forward, or two halves one after the other where memory does not suffice.

        Computing again what a failed forward had begun is harmless. Sampling is not repeated: it advances the rows.
        """
        order = decodes_first(parts)
        ordered = [parts[place] for place in order]
        sampled = [place for place, part in enumerate(ordered) if part.samples]
        try:
            hidden, logits, scores = self._compute(ordered)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or splits == self._max_splits or not all(halves(parts)):
                raise
            logger.warning(
                "Out of memory: a step of %d tokens is computed in two halves", sum(part.count for part in parts)
            )
        else:
            chosen = None
            if logits is not None:
                sampling = [ordered[place] for place in sampled]
                chosen = self._propose(hidden, sampling, self._choose_all(logits, sampling))
            return [ForwardResult(chosen, _restore(order, sampled), scores)]
        release(self.device)  # here, where the error no longer holds what it failed with
        return [outcome for half in halves(parts) for outcome in self._forward(half, splits + 1)]

    def _compute(self, parts: list[RowStep]) -> tuple[torch.Tensor, torch.Tensor | None, dict[int, list[PromptScores]]]:
        """States and logits of the rows that sample, if any do, and log probabilities of prompts."""
        if self.vision_encoder is not None:
            parts = self.vision_encoder.store_images(parts, self.rows, self.cache)
            if not parts:
                return torch.empty(0), None, {}
        if self.stage is not None:
            self.stage.take_tokens(self.rows, parts)
        step = prepare(self.rows, parts, self.cache.block_size, self.dtype)
        if self.stage is not None:
            step = self.stage.enter(step)
        rows, context_lens = step.rows, step.context_lens
        if self.vision_encoder is not None:
            step = self.vision_encoder.add_images(step, parts, self.cache.block_size)
        has_scores = any(map(self.rows.wants_scores, parts))
        if self.adapters is not None:
            self.adapters.begin(step.adapters)
        hidden = self.model.forward(replace(step, logits_indices=None) if has_scores else step, self.cache)
        if self.stage is not None and not self.stage.is_last:
            self.stage.leave(hidden, [part.row for part in parts if part.samples])
            return hidden, None, {}
        if self.graphs is not None:
            self.rows.lengths[rows] = context_lens
            self.rows.out_of_sync.difference_update(part.row for part in parts)
        scores = self._prompt_scores(hidden, parts, step.adapters) if has_scores else {}
        hidden = step.wanted(hidden) if has_scores else hidden
        if not any(part.samples for part in parts):
            return hidden, None, scores
        if step.adapters is not None:
            step.adapters.narrow(step.logits_indices)
        return hidden, self.model.logits(hidden), scores

    def _choose_all(self, logits: torch.Tensor, parts: list[RowStep]) -> SampledTokens:
        """Of parts that sample, from the logits of all positions at which they do."""
        rows = [part.row for part in parts]
        if len(logits) == len(rows):
            return self._choose(logits, rows)
        if self.sampler.is_memoryless(rows) and not self.grammars.active(rows):
            verified = verify_at_once(self._choose_everywhere(logits, parts), parts)
            self.sampler.advance(rows, verified.counts)
            return self._accept(parts, verified)
        verified = verify(logits, parts, self._choose, lambda rows, ids: self.grammars.accept(rows, lambda: ids))
        return self._accept(parts, verified)

    def _choose_everywhere(self, logits: torch.Tensor, parts: list[RowStep]) -> SampledTokens:
        """At all positions, whatever becomes of those before: the sampler does not take note of these tokens."""
        rows = [part.row for part in parts for _ in range(part.num_sampled)]
        if self._likeliest is not None and self.sampler.is_greedy(rows):
            return SampledTokens(rows, *self._likeliest(logits))
        ahead = to_device(np.concatenate([np.arange(part.num_sampled) for part in parts]), self.device)
        sampled = self.sampler.sample_ahead(logits, rows, ahead)
        return SampledTokens(rows, sampled.token_ids, _checked(logits, sampled.logprobs), sampled.top)

    def _propose(self, hidden: torch.Tensor | None, parts: list[RowStep], chosen: SampledTokens) -> SampledTokens:
        """Guess on behind what was sampled: with the draft model, or the speculator from the states [positions,
        hidden_size] of all positions at which was sampled."""
        if not self._num_proposals:
            return chosen
        if self.draft_model is not None:
            known = chosen.per_row() if chosen.counts else []
            chosen = replace(chosen, proposals=self.draft_model.propose(parts, known, self._num_proposals))
        elif self.speculator is not None and hidden is not None:
            chosen = replace(chosen, proposals=self._speculate(self.speculator, hidden, parts, chosen))
        return self._propose_forced(parts, chosen)

    def _propose_forced(self, parts: list[RowStep], chosen: SampledTokens) -> SampledTokens:
        """Where a grammar leaves one text, that is the guess. The host must have the tokens before it for that, and
        waits for them: the router sends no step before it has the result of one that proposes."""
        rows, count = [part.row for part in parts], self._num_proposals
        if not self.grammars.active(rows):
            return chosen
        if not chosen.counts:
            ids: list[int] = chosen.token_ids.tolist()
            self.grammars.accept(rows, lambda: ids)
            chosen = replace(chosen, rows=[])
        proposals = torch.full((len(rows), count), NOT_GUESSED)
        if chosen.proposals is not None:
            proposals[:, : chosen.proposals.shape[1]] = chosen.proposals.cpu()
        for place, tokens in self.grammars.forced(rows, count).items():
            proposals[place] = torch.tensor(tokens + [NOT_GUESSED] * (count - len(tokens)))
        return replace(chosen, proposals=proposals)

    def _speculate(
        self, speculator: Speculator, hidden: torch.Tensor, parts: list[RowStep], chosen: SampledTokens
    ) -> torch.Tensor:
        firsts = [0, *accumulate(part.num_sampled for part in parts)][:-1]
        counts = chosen.counts or [1] * len(parts)
        last = np.array([first + count - 1 for first, count in zip(firsts, counts, strict=True)])
        rows = np.array([part.row for part in parts])
        there = to_device(np.stack((last, rows)), self.device)
        states, token_ids = hidden[there[0]], self.rows.last_tokens[there[1]]
        return speculator.propose(states, token_ids, min(self._num_proposals, speculator.num_tokens))

    def _accept(self, parts: list[RowStep], verified: SampledTokens) -> SampledTokens:
        """The rows go on behind what they have got."""
        ends = accumulate(verified.counts)
        token_ids = verified.token_ids.tolist()
        self.rows.accept_drafts(parts, verified.counts, [token_ids[end - 1] for end in ends])
        return verified

    def _choose(self, logits: torch.Tensor, rows: list[int]) -> SampledTokens:
        if self._likeliest is not None and self.sampler.is_greedy(rows) and not self.grammars.active(rows):
            token_ids, logprobs = self._likeliest(logits)
            self.rows.last_tokens[to_device(np.array(rows), self.device)] = token_ids
            return SampledTokens(rows, token_ids, logprobs)
        sampled = self.sampler.sample(logits, rows, self.grammars.allowed(rows))
        self.rows.last_tokens[to_device(np.array(rows), self.device)] = sampled.token_ids
        logprobs = _checked(logits, sampled.logprobs)
        return SampledTokens(rows, sampled.token_ids, logprobs, sampled.top, self.grammars.errors(rows))

    def _configure_sampler(self, admission: pb.Admission) -> None:
        sequence = self.rows[admission.row]
        ids, num_prompt = sequence.input_ids, len(sequence.input_ids) - admission.num_generated
        # Penalties are for what the decoder has before it.
        prompt_ids, generated_ids = ids[sequence.encoder_len : num_prompt], ids[num_prompt:]
        if self.vision_encoder is not None:  # a token that stands for an image need not be one that is generated
            prompt_ids = prompt_ids[prompt_ids < self.model.config.vocab_size]
        self.sampler.set_row(
            admission.row, admission.parameters, prompt_ids, generated_ids, top_n_tokens=admission.top_n_tokens
        )
        grammar, most = from_pb(admission.parameters), admission.max_new_tokens
        reasoning = RowReasoning.of(admission.parameters)
        self.grammars.set_row(admission.row, grammar, generated_ids.tolist(), most, reasoning)

    def _prompt_scores(
        self, hidden: torch.Tensor, parts: list[RowStep], adapters: StepAdapters | None
    ) -> dict[int, list[PromptScores]]:
        wanted: dict[int, list[PromptScores]] = {}
        first = 0
        for part in parts:
            sequence = self.rows[part.row]
            last = min(part.start + part.count, len(sequence.input_ids) - 1)
            if sequence.prompt_logprobs and part.start < last:
                successors = to_device(sequence.input_ids[part.start + 1 : last + 1], self.device)
                scores = wanted[part.row] = []
                places = range(first, first + last - part.start, PROMPT_LOGITS_TOKENS)
                for place, successor in zip(places, _pieces(successors), strict=True):
                    if adapters is not None:
                        adapters.use(place, place + len(successor))
                    logits = self.model.logits(hidden[place : place + len(successor)])
                    scores.append(prompt_scores(logits, successor, sequence.num_top_tokens))
            first += part.count
        return wanted


def _checked(logits: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """NaN in lines whose logits are not all finite: the largest is finite if the others are, NaN and infinity win."""
    return torch.where(logits.amax(-1).isfinite(), logprobs, float("nan"))


def _restore(order: list[int], sampled: list[int]) -> list[int]:
    """For each sampled row, in the order of the request: its index among the sampled ones of the ordered step."""
    original = [(order[place], index) for index, place in enumerate(sampled)]
    return [index for _, index in sorted(original)]


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor, PROMPT_LOGITS_TOKENS)


def _read_ids(clock: StepClock, chosen: SampledTokens) -> list[int]:
    """The tokens of a step, once they are on the host."""
    clock.wait()
    ids: list[int] = chosen.token_ids.tolist()
    return ids
