"""A shard without tensors: it keeps tokens where the real one keeps keys and values, and checks every read."""

from __future__ import annotations

from dataclasses import dataclass, field

from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, Output, StepPlan, StepResult


def fake_next_token(tokens: list[int], vocab: int) -> int:
    """A deterministic "model": any change of the context changes what follows."""
    state = 17
    for token in tokens:
        state = (state * 1_000_003 + token + 1) & 0xFFFFFFFF
    return (state >> 7) % vocab


@dataclass
class FakeRow:
    tokens: list[int]
    num_computed: int
    blocks: list[int]
    wants_prompt_logprobs: bool


@dataclass
class FakeShard:
    """Executes plans in order. `memory` maps a slot to (position, token); a context is read back through it."""

    block_size: int
    vocab: int = 50
    rows: dict[int, FakeRow] = field(default_factory=dict)
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)
    host: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        for block, slot in plan.copies_out:
            self.host[slot] = [self.memory[place] for place in self._places(block)]
        for slot, block in plan.copies_in:
            self.memory.update(zip(self._places(block), self.host[slot], strict=True))
        for admission in plan.admitted:
            wants = admission.request.prompt_logprobs and admission.num_generated == 0
            self.rows[admission.row] = FakeRow(
                list(admission.input_ids), admission.num_cached, list(admission.blocks), wants
            )
        result = StepResult(plan.id, [], [])
        written: set[int] = set()
        for row, count, new_blocks in zip(plan.rows, plan.num_tokens, plan.new_blocks, strict=True):
            before, drafts = len(result.token_ids), plan.drafts.get(row, [])
            self._run_row(row, count - len(drafts), new_blocks, result, written)
            self._verify(row, drafts, result, written)
            if plan.drafts and len(result.token_ids) > before:
                result.num_sampled.append(len(result.token_ids) - before)
        return result

    def _verify(self, row: int, drafts: list[int], result: StepResult, written: set[int]) -> None:
        """All drafts are written to the cache; while they are right, they are known."""
        state, are_right, start = self.rows[row], True, self.rows[row].num_computed
        for i, draft in enumerate(drafts):
            are_right = are_right and draft == result.token_ids[-1]
            if are_right:
                self._run_row(row, 1, [], result, written)
            else:
                slot = self._slot(state, start + i)
                assert slot not in written, "two rows write one slot in one step"
                self.memory[slot] = (-1, draft)

    def _run_row(self, row: int, count: int, new_blocks: list[int], result: StepResult, written: set[int]) -> None:
        state = self.rows[row]
        state.blocks.extend(new_blocks)
        start, end = state.num_computed, state.num_computed + count
        assert end <= len(state.tokens), "asked to compute a token that is not known"
        for position in range(start, end):
            slot = self._slot(state, position)
            assert slot not in written, "two rows write one slot in one step"
            written.add(slot)
            self.memory[slot] = (position, state.tokens[position])
        context = [self.memory[self._slot(state, position)] for position in range(end)]
        assert context == list(enumerate(state.tokens[:end])), "the cache holds somebody else's tokens"
        state.num_computed = end
        if state.wants_prompt_logprobs:
            # one number per computed prompt token that has a successor in the prompt
            result.prompt_logprobs[row] = [-float(p) for p in range(start, min(end, len(state.tokens) - 1))]
        if end == len(state.tokens):
            state.wants_prompt_logprobs = False
            token = fake_next_token(state.tokens, self.vocab)
            state.tokens.append(token)
            result.token_ids.append(token)
            result.logprobs.append(-1.0)

    def _places(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def _slot(self, state: FakeRow, position: int) -> int:
        return state.blocks[position // self.block_size] * self.block_size + position % self.block_size


def expected_tokens(request: GenerationRequest, vocab: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """What `request` must produce whatever else happens."""
    tokens = list(request.input_ids)
    generated: list[int] = []
    while len(generated) < request.max_new_tokens:
        token = fake_next_token(tokens, vocab)
        tokens.append(token)
        generated.append(token)
        if token in eos and not request.ignore_eos:
            break
    return generated


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is in exactly one place, and every count agrees with what it counts."""
    tree_blocks = [node.block for node in scheduler.tree.nodes()]
    private = [block for entry in scheduler.running for block in entry.private]
    assert len(tree_blocks) == len(scheduler.tree)
    assert scheduler.pool.available + len(tree_blocks) + len(private) == scheduler.pool.total
    everything = [*scheduler.pool._free, *tree_blocks, *private]
    assert len(set(everything)) == len(everything), "a block has two owners"
    assert 0 not in everything, "block 0 is reserved"
    assert sum(node.users == 0 for node in scheduler.tree.nodes()) == scheduler.tree.num_evictable
    rows = [entry.row for entry in scheduler.running]
    assert sorted([*rows, *scheduler._free_rows]) == list(range(scheduler.limits.max_rows))
    assert not {entry.id for entry in scheduler.running} & set(scheduler.queue)


class Simulation:
    """Scheduler and fake shard with up to `depth` steps in flight, as the router runs them."""

    def __init__(self, limits: SchedulerLimits, vocab: int = 50, depth: int = 2) -> None:
        self.scheduler = Scheduler(limits)
        self.shard = FakeShard(limits.block_size, vocab)
        self.depth = depth
        self.in_flight: list[StepPlan] = []
        self.outputs: dict[int, list[Output]] = {}
        self.steps = 0

    def submit(self, request: GenerationRequest) -> None:
        self.outputs[request.id] = []
        self.scheduler.submit(request)

    def launch(self) -> bool:
        if len(self.in_flight) >= self.depth or (plan := self.scheduler.plan()) is None:
            return False
        assert sum(plan.num_tokens) <= self.scheduler.limits.max_step_tokens
        self.in_flight.append(plan)
        return True

    def land(self) -> bool:
        if not self.in_flight:
            return False
        self.steps += 1
        for request_id, output in self.scheduler.complete(self.shard.run(self.in_flight.pop(0))):
            self.outputs[request_id].append(output)
        return True

    def lose(self, limits: SchedulerLimits | None = None) -> None:
        """The shard dies with the steps in flight, and another one takes its place."""
        self.shard = FakeShard(self.shard.block_size, self.shard.vocab)
        self.in_flight.clear()
        for request_id, output in self.scheduler.restart(limits or self.scheduler.limits):
            self.outputs[request_id].append(output)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.launch() or self.land():
            pass

    def tokens(self, request_id: int) -> list[int]:
        return [output.token_id for output in self.outputs[request_id]]
