"""The steps of warm-up: they measure memory, and compile and load everything before the first request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from legato.kernels.attention.configs import distinct_batches
from legato.kernels.compilation.ahead import compiling_ahead
from legato.kernels.compilation.start import CompilerStart
from legato.pb import generate_pb2 as pb
from legato.pb import pack_token_ids
from legato.server.memory.budget import largest_step
from legato.server.memory.capacity import RESERVED_BLOCKS, Capacity, RequestedLimits

if TYPE_CHECKING:
    from legato.server.engine import Engine

logger = logging.getLogger(__name__)

# All parameters that take memory for each row and each token of the vocabulary.
COSTLY = pb.NextTokenChooserParameters(
    temperature=0.9, top_k=50, top_p=0.9, typical_p=0.9, do_sample=True, seed=1,
    repetition_penalty=1.1, frequency_penalty=0.1, min_p=0.01,
)  # fmt: skip
TOP_TOKENS = 5
# Tokens of an ordinary prompt, and of the smallest step with prompts that warm-up runs: smaller ones are CUDA graphs.
PROMPT, SMALL_STEP = 128, 1024
# Of the first prompt that a new cache sees.
FEW_TOKENS = 8
# No kernel is compiled for more tokens than these; products, which are computed all the same, would take their time.
LARGEST_COMPILED = 2048


def full_step(requested: RequestedLimits, *, with_adapters: bool = False) -> pb.StepRequest:
    """The largest step that a router may send. All rows share one block: what is in it does not matter here. With
    adapters all of them have the one in slot 0."""
    counts = largest_step(requested.max_rows, requested.longest, requested.step_tokens)
    num_blocks = [requested.num_blocks(count) for count in counts]
    admissions = [
        pb.Admission(
            row=row,
            input_ids=pack_token_ids([0] * count),
            parameters=COSTLY,
            top_n_tokens=TOP_TOKENS,
            prompt_logprobs=row == 0,
            adapter_id="warm-up" if with_adapters else None,
        )
        for row, count in enumerate(counts)
    ]
    return pb.StepRequest(
        admitted=admissions,
        rows=range(len(counts)),
        num_tokens=counts,
        num_new_blocks=num_blocks,
        new_blocks=[RESERVED_BLOCKS] * sum(num_blocks),
    )


def ordinary_steps(
    requested: RequestedLimits, decodes: list[int] | None = None, largest: int | None = None
) -> Iterator[pb.StepRequest]:
    """Short prompts for all rows, decodes of few and of many rows (or `decodes`), then longer prompts beside decodes,
    in steps up to the `largest`.

    Our kernels are compiled anew and libraries choose other ones for other sizes. For whatever is compiled or loaded
    here no request has to wait: it may take a second. All rows share one block, as in the largest step.
    """
    if requested.longest < 2 * PROMPT:
        return
    all_rows = range(requested.max_rows)
    yield _step(requested, prompts=all_rows, length=max(1, min(PROMPT, requested.step_tokens // requested.max_rows)))
    for count in _ladder(requested.max_rows) if decodes is None else decodes:
        yield _step(requested, decodes=all_rows[:count])
    size = min(requested.step_tokens, largest or requested.step_tokens)
    while size >= SMALL_STEP:
        count = max(1, min(size // PROMPT, requested.max_rows // 2))
        yield _step(requested, prompts=all_rows[:count], length=PROMPT)
        if others := all_rows[count : 2 * count]:
            yield _step(requested, prompts=all_rows[: count - 1], length=PROMPT, decodes=others)
        size //= 2


def decodes_beside_a_prompt(requested: RequestedLimits, num_kv_heads: int) -> Iterator[pb.StepRequest]:
    """After `ordinary_steps`. A step of many tokens has no CUDA graph, and as many decodes as there happen to be."""
    if requested.longest < 2 * PROMPT:
        return
    all_rows = range(requested.max_rows)
    for count in distinct_batches(requested.max_rows - 1, num_kv_heads):
        length = max(1, min(PROMPT, requested.step_tokens - count))
        yield _step(requested, prompts=all_rows[-1:], length=length, decodes=all_rows[:count])


def compile_ahead(engine: Engine, requested: RequestedLimits, compiler: CompilerStart | None = None) -> None:
    """Compile, many at a time, what `ordinary_steps`, the first steps, the first CUDA graphs and larger steps with
    decodes launch. `compiler` is closed."""
    graphs, engine.graphs = engine.graphs, None  # the steps are to run eagerly
    decodes = _ladder(requested.max_rows) if graphs is None else []
    common = (
        *_few_tokens(requested, graphs=graphs is not None),
        *ordinary_steps(requested, decodes, LARGEST_COMPILED),
        *decodes_beside_a_prompt(requested, engine.cache.num_kv_heads),
    )
    processes = None if compiler is None else compiler.processes()
    with compiling_ahead(processes, engine.shard.num_on_machine) as counts, torch.inference_mode():
        for step in common:
            engine.launch(step).read()
            engine.rows.last_tokens.zero_()  # nothing has chosen them, and the next step looks them up
        for kind in [] if graphs is None else graphs.kinds:
            for size in kind.policy.at_start:
                kind.dry_run(size)
                engine.rows.last_tokens.zero_()
    if compiler is not None:
        compiler.close()
    logger.info("Kernels compiled", extra={"fields": asdict(counts)})


def _few_tokens(requested: RequestedLimits, *, graphs: bool) -> list[pb.StepRequest]:
    """As `first_step` and, where it has no graph, `decode_step`: what they launch nothing else may."""
    if requested.longest < 2 * PROMPT:
        return []
    prompt = _step(requested, prompts=range(1), length=FEW_TOKENS)
    return [prompt] if graphs else [prompt, _step(requested, decodes=range(1))]


def _ladder(highest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 and so on: no kernel is chosen for so few sizes that all of these miss them."""
    steps = [count for i in range(highest.bit_length()) for count in (2**i, 3 * 2**i // 2)]
    return [*sorted({count for count in steps if count < highest}), highest]


def _step(
    requested: RequestedLimits, prompts: range = range(0), length: int = 0, decodes: range = range(0)
) -> pb.StepRequest:
    """Prompts of that length, each with room for an answer, and the next token of rows that have had theirs."""
    num_blocks = requested.num_blocks(length + PROMPT)
    return pb.StepRequest(
        admitted=[pb.Admission(row=row, input_ids=pack_token_ids([0] * length)) for row in prompts],
        rows=[*decodes, *prompts],
        num_tokens=[*(1 for _ in decodes), *(length for _ in prompts)],
        num_new_blocks=[*(0 for _ in decodes), *(num_blocks for _ in prompts)],
        new_blocks=[RESERVED_BLOCKS] * (num_blocks * len(prompts)),
    )


def first_step(capacity: Capacity, block_size: int) -> pb.StepRequest:
    """A prompt of a few tokens in row 0, with room for one more."""
    length = min(FEW_TOKENS, capacity.max_total_tokens - 1)
    blocks = list(range(RESERVED_BLOCKS, RESERVED_BLOCKS - (-(length + 1) // block_size)))
    return pb.StepRequest(
        admitted=[pb.Admission(row=0, input_ids=pack_token_ids([0] * length))],
        rows=[0],
        num_tokens=[length],
        num_new_blocks=[len(blocks)],
        new_blocks=blocks,
    )


def decode_step() -> pb.StepRequest:
    """One more token for row 0."""
    return pb.StepRequest(rows=[0], num_tokens=[1], num_new_blocks=[0])
