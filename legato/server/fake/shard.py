"""An engine without a model: it tracks rows and blocks, checks every step against them, and invents tokens.

The router cannot tell the difference, so its speed can be measured alone, and a step that breaks the contract of
`proto/generate.proto` is reported where a real engine would compute wrong tokens. What a row says depends on its
prompt and, if it samples, on its seed: the same request gets the same text whatever runs beside it, preempted or not.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from legato.common.errors import LegatoError
from legato.pb import generate_pb2 as pb
from legato.pb import unpack_token_ids
from legato.server.fake.adapters import FakeAdapters

# The tokens of the answer to a prompt, the last of which ends it; none: it is made up.
Script = Callable[[list[int]], list[int]]
# Odd numbers of 32 bits that mix seed and position, and how far apart in the vocabulary likely tokens lie.
_GOLDEN, _MIX, STRIDE = 0x9E3779B1, 0x85EBCA6B, 7919
# Log probabilities are sixty-fourths, which float32 holds exactly.
LOGPROB_STEPS = 64


class BrokenContract(LegatoError):
    """A step violates the contract between router and shard."""


@dataclass(frozen=True, slots=True)
class FakeLimits:
    """What warm-up promised the router. Block 0 is not for its rows."""

    num_blocks: int
    block_size: int
    max_rows: int
    max_total_tokens: int
    max_step_tokens: int | None  # None: the router named no limit
    vocab_size: int


@dataclass(slots=True)
class _Row:
    tokens: list[int]  # known: those of the admission, then the sampled ones
    num_admitted: int
    num_computed: int
    blocks: list[int]
    seed: int
    num_top_tokens: int
    prompt_logprobs: bool
    num_full: int  # leading blocks whose fingerprint is taken
    fingerprint: int  # of the tokens in those
    answer: list[int] = field(default_factory=list)  # what is said after the prompt, if that is known
    num_prompt: int = 0

    @property
    def samples(self) -> bool:
        return self.num_computed == len(self.tokens)


class FakeEngine:
    def __init__(
        self,
        limits: FakeLimits,
        token_ids: Sequence[int],
        script: Script | None = None,
        adapters: FakeAdapters | None = None,
    ) -> None:
        """`token_ids` are what rows may say; `script` knows what some prompts are answered with."""
        self._adapters = adapters or FakeAdapters()
        assert token_ids, "a vocabulary has at least one token of text"
        self.limits = limits
        self._token_ids = token_ids
        self._script = script
        self._rows: dict[int, _Row] = {}
        # Of all tokens up to the end of each block, for blocks that were filled; None for the others.
        self._fingerprints: list[int | None] = [None] * limits.num_blocks

    def run(self, request: pb.StepRequest) -> pb.StepResponse:
        """BrokenContract leaves the rows of this step in disorder; a router takes them for lost anyway."""
        self._check_shape(request)
        for placement in request.adapters:
            if (problem := self._adapters.place(placement)) is not None:
                raise BrokenContract(problem)
        for admission in request.admitted:
            self._rows[admission.row] = self._admit(admission)
        response = pb.StepResponse(id=request.id)
        token_ids: list[int] = []
        logprobs: list[float] = []
        written: set[int] = set()
        new_blocks, first, first_draft = request.new_blocks, 0, 0
        draft_ids, no_drafts = list(request.draft_ids), list[int]()
        has_counts = len(request.num_drafts) > 0
        num_drafts = list(request.num_drafts) if has_counts else [0] * len(request.rows)
        columns = zip(request.rows, request.num_tokens, request.num_new_blocks, num_drafts, strict=True)
        for number, count, num_new, num_guessed in columns:
            row = self._rows.get(number)
            if row is None:
                raise BrokenContract(f"row {number} computes, but was never admitted")
            if num_new:
                self._append_blocks(number, row, new_blocks[first : first + num_new])
                first += num_new
            start = row.num_computed
            self._compute(number, row, count - num_guessed, written)
            if row.prompt_logprobs:
                self._score_prompt(number, row, start, response)
            drafts = no_drafts
            if num_guessed:
                drafts = draft_ids[first_draft : first_draft + num_guessed]
                first_draft += num_guessed
                self._check_drafts(number, row, num_guessed, written)
            before = len(token_ids)
            while row.num_computed == len(row.tokens):
                token_ids.append(self._sample(row))
                logprobs.append(_logprob(row.seed, len(row.tokens)))
                if row.num_top_tokens:
                    top = self._top_tokens(row, len(row.tokens) - 1)
                    response.top_tokens.add(index=len(token_ids) - 1, ids=top[0], logprobs=top[1])
                if not drafts:
                    break
                num_right = len(token_ids) - before
                if num_right <= len(drafts) and drafts[num_right - 1] == token_ids[-1]:
                    self._compute(number, row, 1, set())
            if has_counts and len(token_ids) > before:
                response.num_sampled.append(len(token_ids) - before)
        response.token_ids.extend(token_ids)
        response.logprobs.extend(logprobs)
        return response

    # ---- what may be asked for ------------------------------------------------------------------------------------

    def _check_shape(self, request: pb.StepRequest) -> None:
        rows, counts, num_new = request.rows, request.num_tokens, request.num_new_blocks
        if not len(rows) == len(counts) == len(num_new):
            raise BrokenContract(
                f"{len(rows)} rows, {len(counts)} num_tokens, {len(num_new)} num_new_blocks: all must have the same"
                " length"
            )
        if not rows:
            raise BrokenContract("the step has no rows")
        if len(set(rows)) < len(rows):
            raise BrokenContract("a row occurs twice in the step")
        if len(request.num_drafts) not in (0, len(rows)) or sum(request.num_drafts) != len(request.draft_ids):
            raise BrokenContract(f"{len(request.draft_ids)} drafts, and num_drafts says {list(request.num_drafts)}")
        if sum(num_new) != len(request.new_blocks):
            raise BrokenContract(f"{len(request.new_blocks)} new blocks, but the rows have room for {sum(num_new)}")
        most = self.limits.max_step_tokens
        if most is not None and sum(counts) > most:
            raise BrokenContract(f"the step has {sum(counts)} tokens; warm-up allowed {most}")

    def _admit(self, admission: pb.Admission) -> _Row:
        number, tokens, blocks = admission.row, unpack_token_ids(admission.input_ids).tolist(), list(admission.blocks)
        if number >= self.limits.max_rows:
            raise BrokenContract(f"row {number} is beyond the {self.limits.max_rows} rows of warm-up")
        if not 0 <= admission.num_generated < len(tokens):
            raise BrokenContract(f"row {number}: {admission.num_generated} of {len(tokens)} tokens were generated")
        if max(tokens) >= self.limits.vocab_size:
            raise BrokenContract(f"row {number}: token {max(tokens)} is outside the vocabulary")
        if not admission.num_cached < len(tokens):
            raise BrokenContract(f"row {number}: nothing is left to compute of {len(tokens)} tokens")
        if admission.num_cached != len(blocks) * self.limits.block_size:
            raise BrokenContract(f"row {number}: {admission.num_cached} cached tokens in {len(blocks)} blocks")
        prompt = tokens[: len(tokens) - admission.num_generated]
        adapter = self._adapters.fingerprint(admission)
        if adapter is None:
            raise BrokenContract(f"row {number}: adapter {admission.adapter_id!r} is not in its slot")
        row = _Row(
            tokens, len(tokens), admission.num_cached, blocks, _seed(prompt, admission.parameters) ^ adapter,
            admission.top_n_tokens, admission.prompt_logprobs, 0, adapter,
        )  # fmt: skip
        if self._script is not None:
            row.answer, row.num_prompt = self._script(prompt), len(prompt)
        for index, block in enumerate(blocks):
            self._check_block(number, block)
            row.fingerprint = self._block_fingerprint(row, index)
            if self._fingerprints[block] != row.fingerprint:
                raise BrokenContract(f"row {number}: block {block} is said to be cached and holds other tokens")
        row.num_full = len(blocks)
        return row

    def _append_blocks(self, number: int, row: _Row, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._check_block(number, block)
        row.blocks.extend(blocks)

    def _check_block(self, number: int, block: int) -> None:
        if not 0 < block < self.limits.num_blocks:
            raise BrokenContract(f"row {number}: block {block} is not one of 1 to {self.limits.num_blocks - 1}")

    # ---- what a step does -----------------------------------------------------------------------------------------

    def _compute(self, number: int, row: _Row, count: int, written: set[int]) -> None:
        """Record the tokens in their blocks. A block that is written belongs to one row."""
        start, end, size = row.num_computed, row.num_computed + count, self.limits.block_size
        if not start < end <= len(row.tokens):
            raise BrokenContract(f"row {number}: asked to compute {count} tokens, {len(row.tokens) - start} are left")
        if end > len(row.blocks) * size:
            raise BrokenContract(f"row {number}: {len(row.blocks)} blocks have no room for {end} tokens")
        if end > self.limits.max_total_tokens:
            raise BrokenContract(f"row {number}: {end} tokens, the longest sequence has {self.limits.max_total_tokens}")
        for index in range(start // size, (end - 1) // size + 1):
            block = row.blocks[index]
            if block in written:
                raise BrokenContract(f"row {number}: block {block} is written by two rows of one step")
            written.add(block)
            self._fingerprints[block] = None
        row.num_computed = end
        while (row.num_full + 1) * size <= end:
            row.fingerprint = self._block_fingerprint(row, row.num_full)
            self._fingerprints[row.blocks[row.num_full]] = row.fingerprint
            row.num_full += 1

    def _check_drafts(self, number: int, row: _Row, num_drafts: int, written: set[int]) -> None:
        """They are computed behind the last token, whether they are right or not."""
        if not row.samples:
            raise BrokenContract(f"row {number}: drafts, but known tokens are left to compute")
        size, end = self.limits.block_size, row.num_computed + num_drafts
        if end > min(len(row.blocks) * size, self.limits.max_total_tokens):
            raise BrokenContract(f"row {number}: {num_drafts} drafts have no room behind {row.num_computed} tokens")
        for block in row.blocks[-(-row.num_computed // size) : -(-end // size)]:
            if block in written:
                raise BrokenContract(f"row {number}: block {block} is written by two rows of one step")
            written.add(block)
            self._fingerprints[block] = None

    def _block_fingerprint(self, row: _Row, index: int) -> int:
        """Of the tokens up to the end of the row's block `index`, given that of the block before."""
        size = self.limits.block_size
        return zlib.crc32(array("I", row.tokens[index * size : (index + 1) * size]).tobytes(), row.fingerprint)

    def _sample(self, row: _Row) -> int:
        if row.answer:  # whose last token ends it, also if a step more is computed
            token = row.answer[min(len(row.tokens) - row.num_prompt, len(row.answer) - 1)]
        else:
            token = self._token_at(row.seed, len(row.tokens))
        row.tokens.append(token)
        return token

    def _token_at(self, seed: int, position: int, rank: int = 0) -> int:
        """No token tells which one follows. A text that can be guessed gets drafts, and its row would be several times
        as fast as the pace of the steps."""
        mixed = (seed ^ position * _GOLDEN) * _MIX & 0xFFFFFFFF
        number = len(self._token_ids)
        return self._token_ids[((mixed * number >> 32) + rank * STRIDE) % number]

    def _top_tokens(self, row: _Row, position: int) -> tuple[list[int], list[float]]:
        """The token at `position` first, then others, each less likely than the one before."""
        likeliest = _logprob(row.seed, position + 1)
        others = [self._token_at(row.seed, position, rank) for rank in range(1, row.num_top_tokens)]
        return [row.tokens[position], *others], [likeliest - rank for rank in range(row.num_top_tokens)]

    def _score_prompt(self, number: int, row: _Row, start: int, response: pb.StepResponse) -> None:
        """For the computed tokens of the admission, how likely their successor in it was."""
        successors = range(start + 1, min(row.num_computed, row.num_admitted - 1) + 1)
        if not successors:
            return
        scores = response.prompt_logprobs.add(row=number)
        for position in successors:
            scores.logprobs.append(_logprob(row.seed, position + 1))
            if row.num_top_tokens:
                ids, logprobs = self._top_tokens(row, position)
                scores.top_ids.extend(ids)
                scores.top_logprobs.extend(logprobs)


def _seed(prompt: list[int], parameters: pb.NextTokenChooserParameters) -> int:
    return zlib.crc32(array("I", prompt).tobytes(), parameters.seed & 0xFFFFFFFF if parameters.do_sample else 0)


def _logprob(seed: int, length: int) -> float:
    """Of the last of `length` tokens."""
    return -((seed + length) % LOGPROB_STEPS + 1) / LOGPROB_STEPS
