"""Today's families beside the shared test: in 16 bits, and with config files that leave things out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.common.errors import UnsupportedModel
from legato.models.config import ModelConfig
from legato.models.dummy import DummyWeights
from legato.models.llama import Mistral
from legato.scheduling.state import GenerationRequest
from tests.models import tiny_today as today
from tests.models.answers import prompts
from tests.models.oracle import oracle_logits
from tests.server.local import LocalServer, load

SIZES = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, vocab_size=10)
MAKERS = [today.tiny_qwen3, today.tiny_gemma, today.tiny_gemma2, today.tiny_gemma3, today.tiny_phi3, today.tiny_olmo2,
          today.tiny_granite]  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.6), (torch.float16, 0.1)])
@pytest.mark.parametrize("make", MAKERS)
def test_16_bits_stay_close_to_32(
    make: Callable[..., Path], dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    folder = make(tmp_path)
    asked = prompts(320)[2:5]
    requests = [GenerationRequest(i, ids, 8, ignore_eos=True) for i, ids in enumerate(asked)]
    server = LocalServer(load(folder, dtype))
    answers = server.run(requests)
    theirs = oracle_logits(folder, [request.input_ids + answers[request.id] for request in requests])
    for request, scores in zip(requests, theirs, strict=True):
        behind = scores[len(request.input_ids) - 1 : -1].log_softmax(-1)
        expected = behind.gather(1, torch.tensor(answers[request.id])[:, None])[:, 0]
        found = torch.tensor([output.logprob for output in server.outputs[request.id]])
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("said", "window"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 5}, 5)])
def test_mistral_has_its_first_window_unless_told_otherwise(said: dict[str, Any], window: int) -> None:
    config = ModelConfig.from_hf({"model_type": "mistral", **SIZES, **said})
    shape = Mistral(config, DummyWeights(torch.float32, torch.device("cpu"))).read(config)
    assert set(shape.windows or (0,)) == {window}


def test_gemma3_may_leave_its_usual_sizes_out() -> None:
    text = dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34,
                sliding_window=1024)  # fmt: skip
    config = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (2560, 34, 262_208)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_positions) == (8, 4, 256, 131_072)


def test_an_unknown_kind_of_layer_is_named() -> None:
    config = ModelConfig.from_hf(
        {"model_type": "qwen3", **SIZES, "layer_types": ["full_attention", "linear_attention"]}
    )
    with pytest.raises(UnsupportedModel, match="layer type 'linear_attention' is not supported; known: full_attention"):
        config.windows(8, lambda layer: True)
