"""Prefill and Decode as TGI has them: one step over a batch, its tokens with texts, and what is left of the batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import grpc
from tokenizers import Tokenizer

from legato.pb import generate_pb2 as pb
from legato.pb import pack_token_ids
from legato.server.interceptor import RequestRefused
from legato.server.legacy.adapters import UnaryAdapters
from legato.server.legacy.batch import BatchCache, Member, RowAndBlockAllocator, TokenOfMember, UnaryBatch
from legato.server.model import Model
from legato.server.vision.prompts import PromptReader
from legato.text.detokenize import Vocabulary
from legato.text.stopping import StopMatcher

Answer = TypeVar("Answer", pb.PrefillResponse, pb.DecodeResponse)

ALREADY_EXISTS = grpc.StatusCode.ALREADY_EXISTS


class UnaryBatches:
    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self._model = model
        self._prompts = PromptReader(tokenizer, model.image_rules)
        self._vocabulary = Vocabulary(tokenizer)
        self._eos = set(model.eos_token_ids)
        self._cache = BatchCache()
        self._allocator = RowAndBlockAllocator(model.capacity)
        self._adapters = UnaryAdapters(model.adapters)
        self._steps = 0

    def prefill(self, request: pb.PrefillRequest) -> pb.PrefillResponse:
        started, concat_ns = time.perf_counter_ns(), None
        if request.HasField("cached_batch"):
            batch, concat_ns = self._join(request)
        else:
            batch = self._begin(request)
        return self._run(batch, pb.PrefillResponse, started, concat_ns)

    def _begin(self, request: pb.PrefillRequest) -> UnaryBatch:
        if request.batch.id in self._cache:
            raise RequestRefused(f"batch {request.batch.id} exists already: decode it or clear it", ALREADY_EXISTS)
        return self._from_pb(request.batch)

    def _join(self, request: pb.PrefillRequest) -> tuple[UnaryBatch, int]:
        """The newcomers and a batch that decodes, as one. If they cannot come in, that batch stays as it is."""
        self._cache.get(request.cached_batch.id)
        newcomers = self._from_pb(request.batch)
        return _concatenated([*self._cache.pop([request.cached_batch.id]), newcomers])

    def decode(self, request: pb.DecodeRequest) -> pb.DecodeResponse:
        started = time.perf_counter_ns()
        if not request.batches:
            raise RequestRefused("Decode needs at least one batch")
        batches, concat_ns = self._cache.pop([cached.id for cached in request.batches]), None
        batch = batches[0]
        if len(batches) > 1:
            batch, concat_ns = _concatenated(batches)
        return self._run(batch, pb.DecodeResponse, started, concat_ns)

    def _run(self, batch: UnaryBatch, answer: type[Answer], started: int, concat_ns: int | None) -> Answer:
        """`concat_ns` where batches were joined."""
        generations, forward_ns = self.generate_token(batch)
        return answer(
            generations=generations,
            batch=self._keep(batch),
            forward_ns=forward_ns,
            decode_ns=time.perf_counter_ns() - started - forward_ns,
            total_ns=time.perf_counter_ns() - started,
            concat_ns=concat_ns,
        )

    def filter(self, request: pb.FilterBatchRequest) -> pb.FilterBatchResponse:
        kept, leaving = self._cache.get(request.batch_id).filter(request.request_ids)
        self._cache.pop([request.batch_id])
        self._leave(leaving)
        self._keep(kept)
        return pb.FilterBatchResponse(batch=kept.to_pb())

    def clear(self, request: pb.ClearCacheRequest) -> None:
        """A batch that is gone already is fine: callers clear up after errors, too."""
        wanted = [request.id] if request.HasField("id") else list(self._cache)
        for batch in self._cache.pop([batch_id for batch_id in wanted if batch_id in self._cache]):
            self._leave(batch.members)

    def generate_token(self, batch: UnaryBatch) -> tuple[list[pb.Generation], int]:
        """One step over all members. Those that end leave the batch. If the step fails, all of them do."""
        self._steps += 1
        chunks = [self._chunk(member) for member in batch.members]
        try:
            response = self._model.engine.launch(self._step(batch.members, chunks)).read()
            for failed in response.row_errors:  # these calls know no error of a single request
                raise RequestRefused(failed.message)
        except BaseException:
            self._leave(batch.members)
            raise
        prompt_logprobs = {item.row: item.logprobs for item in response.prompt_logprobs}
        tops = {item.index: (list(item.ids), list(item.logprobs)) for item in response.top_tokens}
        generations, left, index = [], [], 0
        for member, count in zip(batch.members, chunks, strict=True):
            samples = count == member.num_to_compute
            member.num_computed += count
            member.admitted = True
            member.prompt_logprobs.extend(prompt_logprobs.get(member.row, ()))
            if not samples:
                continue
            generation = self._generation(member, response, index, tops.get(index))
            generations.append(generation.to_pb(self._vocabulary))
            if generation.finish_reason is not None:
                left.append(member)
            index += 1
        batch.members = [member for member in batch.members if member not in left]
        self._leave(left)
        return generations, int(response.forward_ns)

    def _chunk(self, member: Member) -> int:
        """The caller sizes the first chunk of a prompt; the rest follows in one."""
        can_cut = not self._model.whole_prompts and not member.images
        if can_cut and not member.admitted and member.request.HasField("chunk_len") and member.request.chunk_len:
            return min(int(member.request.chunk_len), member.num_to_compute)
        return member.num_to_compute

    def _step(self, members: Sequence[Member], chunks: list[int]) -> pb.StepRequest:
        newcomers = [member for member in members if not member.admitted]
        return pb.StepRequest(
            id=self._steps,
            admitted=[
                pb.Admission(
                    row=member.row,
                    request_id=member.request.id,
                    input_ids=pack_token_ids(member.input_ids),
                    num_cached=member.num_computed,
                    blocks=member.blocks,
                    parameters=member.request.parameters,
                    top_n_tokens=member.request.top_n_tokens,
                    prompt_logprobs=member.request.prefill_logprobs,
                    images=member.images,
                    max_new_tokens=member.request.stopping_parameters.max_new_tokens,
                    adapter_id=member.request.adapter_id or None,
                    adapter_slot=self._adapters.slot(member),
                )
                for member in newcomers
            ],
            adapters=self._adapters.take_placements(),
            rows=[member.row for member in members],
            num_tokens=chunks,
            num_new_blocks=[0] * len(members),
        )

    def _generation(
        self, member: Member, response: pb.StepResponse, index: int, top: tuple[list[int], list[float]] | None
    ) -> TokenOfMember:
        token_id, logprob = response.token_ids[index], response.logprobs[index]
        member.num_generated += 1
        text = member.stops.feed(member.detokenizer.push(token_id))
        reason = self._finish_reason(member, token_id)
        if reason is not None and reason != pb.FINISH_REASON_STOP_SEQUENCE:
            text += member.detokenizer.flush()
        member.pieces.append(text)
        shown = self._vocabulary.special.get(token_id, text)
        return TokenOfMember(member, token_id, logprob, shown, top, reason)

    def _finish_reason(self, member: Member, token_id: int) -> pb.FinishReason | None:
        stopping = member.request.stopping_parameters
        if member.num_generated >= stopping.max_new_tokens:
            return pb.FINISH_REASON_LENGTH
        if token_id in self._eos and not stopping.ignore_eos_token:
            return pb.FINISH_REASON_EOS_TOKEN
        return pb.FINISH_REASON_STOP_SEQUENCE if member.stops.stopped else None

    def _from_pb(self, batch: pb.Batch) -> UnaryBatch:
        members: list[Member] = []
        try:
            for request in batch.requests:
                members.append(self._member(request))
        except BaseException:
            self._leave(members)
            raise
        if not members:
            raise RequestRefused("Prefill needs at least one request")
        return UnaryBatch(batch.id, members)

    def _member(self, request: pb.Request) -> Member:
        prompt = self._prompts.read(request)
        ids, start = prompt.input_ids, self._model.decoder_start_token_id
        ids = ids if start is None or not ids else [*ids, start]
        self._check(request, ids)
        stopping = request.stopping_parameters
        # The keys and values of the last token are never needed.
        needed = -(-max(len(ids), len(ids) + stopping.max_new_tokens - 1) // self._model.block_size)
        row = self._allocator.take_row()
        try:
            own = not request.blocks
            blocks = (
                self._allocator.take_blocks(needed) if own else self._allocator.share_blocks([*request.blocks], needed)
            )
        except RequestRefused:
            self._allocator.free(row, [])
            raise
        context = ids if start is None else ()  # a decoder's text begins afresh
        detokenizer, stops = self._vocabulary.detokenizer(context), StopMatcher(stopping.stop_sequences)
        cached = 0 if own else request.cache_len
        num_prompt = len(prompt.input_ids)
        member = Member(
            request, ids, row, blocks, detokenizer, stops, cached, prompt.images, num_prompt_tokens=num_prompt
        )
        try:
            self._adapters.hold(member)
        except RequestRefused:
            self._allocator.free(row, blocks)
            raise
        return member

    def _check(self, request: pb.Request, ids: list[int]) -> None:
        """Steps of a router are trusted; unary calls come from other clients."""
        new, longest = request.stopping_parameters.max_new_tokens, self._model.capacity.max_total_tokens
        vocab_size = self._model.loaded.model.config.vocab_size
        if not ids or len(ids) + new > longest:
            problem = f"{len(ids)} prompt tokens and {new} new ones are not within 1 to {longest}"
        elif max(ids) >= vocab_size:
            problem = f"token {max(ids)} is not in the vocabulary of {vocab_size} tokens"
        elif request.cache_len % self._model.block_size and self._model.kv_shape.keeps_states:
            problem = f"{request.cache_len} tokens are cached; of this model it must be whole blocks of its block_size"
        elif request.cache_len >= len(ids):
            problem = f"{request.cache_len} of {len(ids)} prompt tokens are cached; at least one must be computed"
        else:
            return
        raise RequestRefused(f"request {request.id}: {problem}")

    def _keep(self, batch: UnaryBatch) -> pb.CachedBatch | None:
        if not batch.members:
            return None
        self._cache.set(batch)
        return batch.to_pb()

    def _leave(self, members: Sequence[Member]) -> None:
        for member in members:
            self._allocator.free(member.row, member.blocks)
            self._adapters.release(member)


def _concatenated(batches: list[UnaryBatch]) -> tuple[UnaryBatch, int]:
    """One batch, and the nanoseconds that took."""
    started = time.perf_counter_ns()
    return UnaryBatch.concatenate(batches), time.perf_counter_ns() - started
