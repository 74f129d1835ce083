"""Quantizing on load takes no more host memory than the quantized model and the largest file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

NUM_LAYERS, HIDDEN, INNER = 5, 768, 3072
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
MEBIBYTE = 1 << 20
# What torch's own buffers and the interpreter take beside the weights.
SLACK = 24 * MEBIBYTE

PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from legato.modelfiles.files import ModelFiles
from legato.models import checkpoint
from legato.models.config import ModelConfig
from legato.models.registry import get_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

checkpoint.DEQUANTIZED_ON.clear()
files = ModelFiles.open(Path(sys.argv[1]))
torch.nn.functional.linear(torch.ones(4, 4), torch.ones(4, 4))
before = peak()
get_model(files, ModelConfig.from_hf(files.config()), torch.bfloat16, torch.device("cpu"), quantize=sys.argv[2])
print(peak() - before)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for each layer, in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    where = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file)
        where.update(dict.fromkeys(tensors, file))

    for layer in range(NUM_LAYERS):
        root = f"model.layers.{layer}"
        tensors = {f"{root}.{name}.weight": torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{root}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
        write(f"layer-{layer}.safetensors", tensors)
    table = torch.randn(64, HIDDEN).bfloat16()
    write("rest.safetensors", {"model.embed_tokens.weight": table, "model.norm.weight": torch.ones(HIDDEN).bfloat16()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = dict(
        model_type="llama", vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("name", "bytes_per_weight"), [("int8", 1.0), ("int4", 0.53)])
def test_the_dense_model_is_never_there(folder: Path, name: str, bytes_per_weight: float) -> None:
    command = [sys.executable, "-c", PROGRAM, str(folder), name]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    numbers = NUM_LAYERS * sum(rows * columns for rows, columns in SHAPES.values())
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert taken < numbers * bytes_per_weight + largest + SLACK < numbers * 2
