"""On a GPU: a step is queued without waiting for what the device still computes, whatever its requests ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.pb import generate_pb2 as pb
from legato.scheduling.state import GenerationRequest
from tests.generation import generation, sampling
from tests.server.local import DEVICE, LocalServer, load
from tests.tiny_models import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device and LEGATO_TEST_DEVICE=cuda"),
]
SAMPLINGS = {
    "greedy": sampling(),
    "drawn": sampling(do_sample=True, seed=1, temperature=0.7, top_k=20, top_p=0.9, typical_p=0.9),
    "penalties": sampling(repetition_penalty=1.2, frequency_penalty=0.5),
}


def requests(parameters: pb.NextTokenChooserParameters, first_id: int) -> list[GenerationRequest]:
    asked: list[dict[str, Any]] = [{"prompt_logprobs": True}, {"top_n_tokens": 2}, {}]
    return [
        generation(first_id + i, list(range(3, 40 + 7 * i)), 12, parameters, ignore_eos=True, **besides)
        for i, besides in enumerate(asked)
    ]


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_launching_a_step_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    server = LocalServer(load(tiny_llama(tmp_path)))
    server.run(requests(SAMPLINGS[kind], 0))  # compiles kernels, which may wait
    launch, count = server.engine.launch, 0

    def watched(request):
        nonlocal count
        count += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(request)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(server.engine, "launch", watched)
    answers = server.run(requests(SAMPLINGS[kind], 10))
    assert count >= 12 and all(len(tokens) == 12 for tokens in answers.values())
