"""A shard without tensors: rows, block tables and a KV cache that remembers what was written into each block."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from legato.pb import generate_pb2 as pb
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.state import Admission, StepPlan, StepResult
from tests.simulation.model import EOS, GARBAGE, START, VOCAB, extend, prompt_logprob, sample, top_tokens

OUT_OF_MEMORY = "CUDA out of memory (simulated)"
ROW_ERROR = "the grammar failed (simulated)"


@dataclass(slots=True)
class StepFaults:
    """Probabilities, for each step."""

    out_of_memory: float = 0.0
    row_error: float = 0.0


@dataclass(slots=True)
class ShardRow:
    request_id: int
    tenant: str
    seed: int
    num_top: int
    tokens: list[int]
    blocks: list[int]
    num_computed: int
    wants_prompt_logprobs: bool
    end_ids: frozenset[int]


def seed_of(payload: bytes) -> int:
    """All sampling parameters take part."""
    return zlib.crc32(payload)


class SimulatedShard:
    """Executes plans in order. `blocks[b]` is the state (`model.extend`) after the last token that was written to block
    b; rows read their contexts from there, so whatever is stale, lost or somebody else's changes the next token."""

    def __init__(
        self, limits: SchedulerLimits, faults: StepFaults, rng: random.Random, failed: list[tuple[int, str]]
    ) -> None:
        """`failed` is where the errors go that requests were given, for their clients to compare."""
        self.rows: dict[int, ShardRow] = {}
        self._limits = limits
        self._faults = faults
        self._failed = failed
        self._rng = rng
        self._blocks = [GARBAGE] * limits.num_blocks
        self._tenants = [""] * limits.num_blocks  # who wrote it
        # In host memory: the state of a block, and its tenant.
        self._slots = [(GARBAGE, "")] * limits.num_host_blocks
        # Of the step that is computed: blocks, and rows that sample.
        self._written: set[int] = set()
        self._sampling: list[ShardRow] = []
        self.num_copied_back = 0

    def run(self, plan: StepPlan) -> StepResult:
        has_copied = self._copy(plan)
        for admission in plan.admitted:
            self._admit(admission, is_cached=has_copied)
        self._check(plan)
        result = StepResult(plan.id, [], [])
        self._written.clear()
        self._sampling.clear()
        for row, count, new_blocks in zip(plan.rows, plan.num_tokens, plan.new_blocks, strict=True):
            state = self.rows[row]
            state.blocks += new_blocks
            before, drafts = len(result.token_ids), plan.drafts.get(row, [])
            self._compute(state, row, count - len(drafts), result)
            self._verify(state, row, drafts, result)
            if plan.drafts and len(result.token_ids) > before:
                result.num_sampled.append(len(result.token_ids) - before)
        faults = self._faults
        if not has_copied:
            return self._fail(plan)
        if faults.out_of_memory or faults.row_error:
            chance = self._rng.random()
            if chance < faults.out_of_memory:
                return self._fail(plan)
            if chance < faults.out_of_memory + faults.row_error and result.token_ids:
                self._fail_row(result)
        return result

    def _copy(self, plan: StepPlan) -> bool:
        """To host memory, and then back from there. False: the step fails before that."""
        copies = (*plan.copies_out, *plan.copies_in)
        if copies and self._faults.out_of_memory and self._rng.random() < 0.5:
            return False
        for block, slot in plan.copies_out:
            self._slots[slot] = self._blocks[block], self._tenants[block]
        for slot, block in plan.copies_in:
            self._blocks[block], self._tenants[block] = self._slots[slot]
        self.num_copied_back += len(plan.copies_in)
        return True

    def _admit(self, admission: Admission, *, is_cached: bool) -> None:
        request, blocks = admission.request, admission.blocks
        assert admission.num_cached == len(blocks) * self._limits.block_size, "cached blocks are full"
        assert admission.num_cached < len(admission.input_ids), "some token must be computed"
        if is_cached and not self._limits.share_prefix_cache:
            assert all(self._tenants[block] == request.tenant for block in blocks), "a prefix of another tenant is used"
        parameters = pb.Admission.FromString(request.payload)
        self.rows[admission.row] = ShardRow(
            request.id,
            request.tenant,
            seed_of(request.payload),
            parameters.top_n_tokens,
            admission.input_ids.tolist(),
            list(blocks),
            admission.num_cached,
            request.prompt_logprobs and admission.num_generated == 0,
            frozenset() if request.ignore_eos else EOS,
        )

    def _check(self, plan: StepPlan) -> None:
        limits, rows = self._limits, set(plan.rows)
        assert len(rows) == len(plan.rows), "a row is in one plan twice"
        assert len(rows) <= limits.max_rows and max(rows) < limits.max_rows, "rows that the shards do not have"
        assert sum(plan.num_tokens) <= limits.max_step_tokens, "more tokens than a step may have"
        for admission in plan.admitted:
            assert admission.row in rows, "a request is admitted and nothing of it is computed"

    def _verify(self, state: ShardRow, row: int, drafts: list[int], result: StepResult) -> None:
        """All drafts are written, right or wrong; those that are right lead to the next token."""
        start, size, wrong = state.num_computed, self._limits.block_size, 0
        for place, draft in enumerate(drafts):
            assert 0 <= draft < VOCAB and draft not in state.end_ids, "no such token is a guess"
            assert start + place < len(state.blocks) * size, "drafts without room"
            if not wrong and draft == result.token_ids[-1]:
                if (start + place) % size:  # the block of the token before, which this row has written, too
                    self._written.discard(state.blocks[(start + place) // size])
                self._compute(state, row, 1, result)
            else:
                wrong += 1
        # Those that were wrong are in the blocks behind the last token, until others are written there.
        for block in state.blocks[-(-state.num_computed // size) : -(-(start + len(drafts)) // size)]:
            assert block not in self._written, "two rows write to one block in one step"
            self._written.add(block)
            self._blocks[block] = GARBAGE

    def _compute(self, state: ShardRow, row: int, count: int, result: StepResult) -> None:
        size, tokens, table, blocks = self._limits.block_size, state.tokens, state.blocks, self._blocks
        start = state.num_computed
        state.num_computed = end = start + count
        assert end <= len(tokens), "asked to compute a token that is not known"
        assert end <= len(table) * size, "asked to compute a token that has no block"
        context = blocks[table[(start - 1) // size]] if start else START
        first_block, num_blocks = start // size, -(-end // size)
        for block in table[first_block:num_blocks]:
            assert block not in self._written, "two rows write to one block in one step"
            self._written.add(block)
            self._tenants[block] = state.tenant
        logprobs = []
        for position in range(start, end):
            context = extend(context, tokens[position])
            blocks[table[position // size]] = context
            logprobs.append(prompt_logprob(context))
        is_sampled = end == len(tokens)
        if state.wants_prompt_logprobs:
            # One for each computed token whose successor is in the prompt.
            found = result.prompt_logprobs[row] = logprobs[:-1] if is_sampled else logprobs
            if state.num_top:
                result.prompt_top_tokens[row] = [top_tokens((0, logprob), state.num_top) for logprob in found]
        if is_sampled:
            state.wants_prompt_logprobs = False
            sampled = sample(state.seed, end, [blocks[block] for block in table[:num_blocks]])
            if state.num_top:
                result.top_tokens[len(result.token_ids)] = top_tokens(sampled, state.num_top)
            tokens.append(sampled[0])
            self._sampling.append(state)
            result.token_ids.append(sampled[0])
            result.logprobs.append(sampled[1])

    def _fail(self, plan: StepPlan) -> StepResult:
        """The whole step: what it should have written is undefined."""
        for block in self._written:
            self._blocks[block] = GARBAGE
        self._failed += [(self.rows[row].request_id, OUT_OF_MEMORY) for row in plan.rows]
        return StepResult(plan.id, [], [], error=OUT_OF_MEMORY)

    def _fail_row(self, result: StepResult) -> None:
        """One row that samples. Its keys and values may be no numbers."""
        index = self._rng.randrange(len(result.token_ids))
        state = self._sampling[index]
        result.row_errors[index] = ROW_ERROR
        result.token_ids[index] = 0
        self._failed.append((state.request_id, ROW_ERROR))
        for block in self._written.intersection(state.blocks):
            self._blocks[block] = GARBAGE
