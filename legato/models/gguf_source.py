"""A GGUF file read as if it were a Hugging Face checkpoint: other names, other row order of q and k, quantised."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from legato.common.errors import UnsupportedModel
from legato.common.gguf import GgufFile
from legato.quantization.gguf import dequantize

# GGUF name -> Hugging Face name; {} is the layer.
LLAMA_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}
# Frequencies that are part of the configuration (Llama 3), not a weight.
NOT_WEIGHTS = {"rope_freqs.weight"}


class GgufSource:
    def __init__(self, path: Path) -> None:
        self._file = GgufFile.open(path)
        architecture = self._file.metadata["general.architecture"]
        if architecture != "llama":
            raise UnsupportedModel(f"{path}: GGUF architecture '{architecture}' is not supported; known: llama")
        self._num_heads = int(self._file.metadata["llama.attention.head_count"])
        self._num_kv_heads = int(self._file.metadata.get("llama.attention.head_count_kv", self._num_heads))
        self._gguf_names = {_hf_name(name): name for name in self._file.tensors if name not in NOT_WEIGHTS}

    def names(self) -> set[str]:
        return set(self._gguf_names)

    def nbytes(self) -> int:
        return sum(4 * _count(tensor.shape) for tensor in self._file.tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._file.tensors[self._gguf_names[name]]
        values = dequantize(self._file.raw(stored.name), stored.type, stored.shape)
        if name.endswith("q_proj.weight"):
            return _restore_halves(values, self._num_heads)
        if name.endswith("k_proj.weight"):
            return _restore_halves(values, self._num_kv_heads)
        return values


def _hf_name(name: str) -> str:
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer is None:
        return LLAMA_NAMES.get(name, name)
    generic = "blk.{}." + name[layer.end() :]
    return LLAMA_NAMES.get(generic, name).format(layer.group(1)) if generic in LLAMA_NAMES else name


def _restore_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp turns neighbouring rows, Hugging Face rows half a head apart: undo its interleaving."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
