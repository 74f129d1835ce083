"""What a model answers to a ragged batch: the tokens as the server would generate them, and the logits behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from legato.layers.kv_cache import KVCache
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.registry import CausalModel, LimitedModel, get_model
from legato.scheduling.state import GenerationRequest
from legato.server.prepare import prepare
from legato.server.rows import Rows
from tests.server.local import DEVICE, LocalServer

NUM_TOKENS = 48
# Ragged; the longest are computed in several steps, beside the decodes of the others.
LENGTHS = (1, 3, 17, 40, 64, 90, 5, 16)
STEP_TOKENS = 48
# ... but not by encoder-decoder models: room for the longest prompt beside everybody's decodes.
WHOLE_STEP_TOKENS = 128
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Answers:
    tokens: list[list[int]]
    logprobs: list[list[float]]  # of the tokens, as they were generated
    logits: list[torch.Tensor]  # [prompt and answer, vocab], all sequences in one step


def prompts(vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def answer(folder: Path, requests: list[list[int]], shard: Shard | None = None, quantize: str | None = None) -> Answers:
    """Greedy, from one shard's point of view; all shards of a model call this together."""
    files = ModelFiles.open(folder)
    model = get_model(files, ModelConfig.from_hf(files.config()), torch.float32, DEVICE, shard=shard, quantize=quantize)
    if isinstance(model, LimitedModel):
        model.limit(max(map(len, requests)) + NUM_TOKENS)
    start = start_of(model)
    server = LocalServer(
        model, num_blocks=256, block_size=BLOCK_SIZE, step_tokens=WHOLE_STEP_TOKENS if start else STEP_TOKENS
    )
    todo = [GenerationRequest(i, ids, NUM_TOKENS, ignore_eos=True) for i, ids in enumerate(requests)]
    tokens = server.run(todo)
    logprobs = [[output.logprob for output in server.outputs[i]] for i in range(len(requests))]
    whole = [ids + start + tokens[i] for i, ids in enumerate(requests)]
    return Answers([tokens[i] for i in range(len(requests))], logprobs, step_logits(model, whole, NUM_TOKENS))


def start_of(model: CausalModel) -> list[int]:
    """What stands between prompt and answer: the first token of a decoder, where there is an encoder."""
    start = model.config.decoder_start_token_id
    return [] if start is None else [start]


def step_logits(model: CausalModel, sequences: list[list[int]], num_generated: int = 0) -> list[torch.Tensor]:
    """Logits of every position, all sequences as whole prompts in one step."""
    needed = [-(-len(ids) // BLOCK_SIZE) for ids in sequences]
    rows, first = Rows(len(sequences), max(needed), DEVICE, bool(start_of(model))), 1
    for row, (ids, count) in enumerate(zip(sequences, needed, strict=True)):
        rows.admit(row, row, ids, 0, False, num_generated=num_generated)
        rows.append_blocks(row, list(range(first, first + count)))
        first += count
    rows.write_blocks()
    parts = [rows.advance(row, len(ids)) for row, ids in enumerate(sequences)]
    step = replace(prepare(rows, parts, BLOCK_SIZE, torch.float32), logits_indices=None)
    with torch.inference_mode():
        logits = model.logits(model.forward(step, KVCache(model.kv_shape, first, BLOCK_SIZE, DEVICE)))
    return list(logits.cpu().split([len(ids) for ids in sequences]))
