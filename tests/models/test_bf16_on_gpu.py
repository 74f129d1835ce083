"""bfloat16 on a GPU: the tokens of a wide random Llama under teacher forcing, against transformers in bfloat16.

The text is random, so its best and second best token are close: kernels must round where transformers rounds. Between
two attention implementations of transformers itself 95 % of the positions agree here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.models.registry import CausalModel
from tests.generation import generation
from tests.server.local import DEVICE, LocalServer, load
from tests.tiny_models import tiny_llama

# On a machine with a GPU the tests run on the CPU all the same, unless told otherwise (`make test-gpu`).
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs LEGATO_TEST_DEVICE=cuda")]

WIDTH_OF_8B = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=128256, max_position_embeddings=4096, initializer_range=0.02,
)  # fmt: skip
LENGTHS = (64, 200, 500, 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("wide"), dtype=torch.bfloat16, **WIDTH_OF_8B)


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder, torch.bfloat16)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda").eval()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(10, 120000, (length,), generator=generator).tolist() for length in LENGTHS]


def expected(oracle: Any, text: list[int]) -> list[int]:
    with torch.inference_mode():
        return oracle(torch.tensor([text], device="cuda")).logits[0].argmax(-1).tolist()


def test_99_percent_of_the_tokens_after_a_given_text_agree(model: CausalModel, oracle: Any, texts: list) -> None:
    requests = [
        generation(i, text, 1, prompt_logprobs=True, top_n_tokens=1, ignore_eos=True) for i, text in enumerate(texts)
    ]
    server = LocalServer(model, num_blocks=256, step_tokens=2048)
    for request in requests:  # one at a time, as transformers reads them: a batch is multiplied in other tiles
        server.run([request])
    agreed = total = 0
    for request in requests:
        tops = server.outputs[request.id][0].prompt_top_tokens
        assert tops is not None
        # What follows the last token of the text is not among them.
        ours = [top[0][0] for top in tops[1:] if top]
        theirs = expected(oracle, request.input_ids)[:-1]
        total += len(theirs)
        agreed += sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"{agreed / total:.2%} of {total} positions agree")
    assert agreed / total >= 0.99


def test_decoding_finds_the_tokens_that_reading_its_answer_finds(
    model: CausalModel, oracle: Any, texts: list[list[int]]
) -> None:
    """One token at a time, through decode graphs: other kernels than those for prompts, so sums round differently."""
    requests = [generation(i, text, 128, ignore_eos=True) for i, text in enumerate(texts)]
    answers = LocalServer(model, num_blocks=256).run(requests)
    agreed = 0
    for request in requests:
        theirs = expected(oracle, request.input_ids + answers[request.id])[len(request.input_ids) - 1 : -1]
        agreed += sum(a == b for a, b in zip(answers[request.id], theirs, strict=True))
    share = agreed / (128 * len(requests))
    print(f"{share:.2%} of {128 * len(requests)} positions agree")
    assert share >= 0.95  # what two implementations of transformers come to
