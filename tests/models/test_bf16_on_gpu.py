"""bfloat16 on a GPU: the tokens of a wide random Llama under teacher forcing, against transformers in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from legato.router.state import GenerationRequest
from tests.server.local import LocalServer, load
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_TOKENS = 128
WIDTH_OF_8B = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=128256, max_position_embeddings=4096, initializer_range=0.02,
)  # fmt: skip


def test_99_percent_of_the_positions_agree(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path, dtype=torch.bfloat16, **WIDTH_OF_8B)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(10, 120000, (length,), generator=generator).tolist() for length in (7, 64, 128, 500)]
    requests = [GenerationRequest(i, prompt, NUM_TOKENS, ignore_eos=True) for i, prompt in enumerate(prompts)]
    answers = LocalServer(load(folder, torch.bfloat16), num_blocks=256).run(requests)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda").eval()
    agreed = 0
    for request in requests:
        answer = torch.tensor(answers[request.id], device="cuda")
        with torch.inference_mode():
            scores = oracle(torch.tensor([request.input_ids + answer.tolist()], device="cuda")).logits[0]
        expected = scores[len(request.input_ids) - 1 : -1]
        # bfloat16 has so few digits that the best score is often that of several tokens: any of them is right.
        agreed += int((expected.gather(1, answer[:, None])[:, 0] == expected.amax(-1)).sum())
    share = agreed / (NUM_TOKENS * len(requests))
    print(f"{share:.2%} of {NUM_TOKENS * len(requests)} positions agree")
    assert share >= 0.99
