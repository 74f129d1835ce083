"""A GGUF file read as if it were a Hugging Face checkpoint: other names, other row order of q and k, quantised."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from legato.common.errors import UnsupportedModel
from legato.modelfiles.gguf.file import GgufFile, GgufTensor
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
    "blk.{}.attn_q.bias": "model.layers.{}.self_attn.q_proj.bias",
    "blk.{}.attn_k.bias": "model.layers.{}.self_attn.k_proj.bias",
    "blk.{}.attn_v.bias": "model.layers.{}.self_attn.v_proj.bias",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.attn_output.bias": "model.layers.{}.self_attn.o_proj.bias",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_gate.bias": "model.layers.{}.mlp.gate_proj.bias",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_up.bias": "model.layers.{}.mlp.up_proj.bias",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
    "blk.{}.ffn_down.bias": "model.layers.{}.mlp.down_proj.bias",
}
QWEN3_NAMES = {
    **LLAMA_NAMES,
    "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
}
GEMMA2_NAMES = {
    **QWEN3_NAMES,  # whose norms on heads Gemma 3 has
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    "blk.{}.post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
PHI3_NAMES = {
    **LLAMA_NAMES,
    "blk.{}.attn_qkv.weight": "model.layers.{}.self_attn.qkv_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.gate_up_proj.weight",
}
OLMO2_NAMES = {
    **QWEN3_NAMES,  # whose norms on queries and keys it has, over all heads
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
STARCODER2_NAMES = {
    **LLAMA_NAMES,
    "output_norm.bias": "model.norm.bias",
    "blk.{}.attn_norm.bias": "model.layers.{}.input_layernorm.bias",
    "blk.{}.ffn_norm.bias": "model.layers.{}.post_attention_layernorm.bias",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.c_fc.weight",
    "blk.{}.ffn_up.bias": "model.layers.{}.mlp.c_fc.bias",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.c_proj.weight",
    "blk.{}.ffn_down.bias": "model.layers.{}.mlp.c_proj.bias",
}
# The names of each GGUF architecture. One that differs from Llama in a few has {**LLAMA_NAMES, ...}.
NAMES = {
    "llama": LLAMA_NAMES,
    "qwen2": LLAMA_NAMES,
    "qwen3": QWEN3_NAMES,
    "gemma": LLAMA_NAMES,
    "gemma2": GEMMA2_NAMES,
    "gemma3": GEMMA2_NAMES,
    "phi3": PHI3_NAMES,
    "olmo2": OLMO2_NAMES,
    "granite": LLAMA_NAMES,
    "starcoder2": STARCODER2_NAMES,
}
# Architectures whose q and k llama.cpp stores so that neighbouring rows turn together.
INTERLEAVED = {"llama", "granite"}
# Architectures whose norms llama.cpp stores with the one that the model adds to them.
NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3"}
# Frequencies that are part of the configuration (Llama 3, Phi-3), not a weight.
NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}


class GgufSource:
    def __init__(self, path: Path) -> None:
        self._file = GgufFile.open(path)
        architecture = str(self._file.metadata["general.architecture"])
        if architecture not in NAMES:
            raise UnsupportedModel(
                f"{path}: GGUF architecture '{architecture}' is not supported; known: {', '.join(NAMES)}"
            )
        names = NAMES[architecture]
        self._gguf_names = {_hf_name(name, names): name for name in self._file.tensors if name not in NOT_WEIGHTS}
        num_heads = int(self._file.metadata[f"{architecture}.attention.head_count"])
        num_kv_heads = int(self._file.metadata.get(f"{architecture}.attention.head_count_kv", num_heads))
        self._norm_offset = 1.0 if architecture in NORMS_PLUS_ONE else 0.0
        self._interleaved = {"attn_q": num_heads, "attn_k": num_kv_heads} if architecture in INTERLEAVED else {}

    def names(self) -> set[str]:
        return set(self._gguf_names)

    def nbytes(self) -> int:
        return sum(4 * math.prod(tensor.shape) for tensor in self._file.tensors.values())

    def stored(self, name: str) -> GgufTensor:
        """By its name in Hugging Face's checkpoints."""
        return self._file.tensors[self._gguf_names[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def file(self, name: str) -> Path:
        return self._file.path

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Rows are whole numbers of blocks. Columns that are not are cut after decoding."""
        stored = self.stored(name)
        size = stored.type.block_size
        index += (slice(None),) * (len(stored.shape) - len(index))
        columns, in_blocks = index[-1], slice(None)
        if columns != slice(None) and columns.start % size == columns.stop % size == 0:
            columns, in_blocks = slice(None), slice(columns.start // size, columns.stop // size)
        blocks = self._file.raw(stored.name).reshape(*stored.shape[:-1], -1, stored.type.block_bytes)
        wanted = np.ascontiguousarray(blocks[(*index[:-1], in_blocks)])
        shape = (*wanted.shape[:-2], wanted.shape[-2] * size)
        values = dequantize(wanted, stored.type, shape)[..., columns]
        if stored.name.endswith("norm.weight"):
            return values - self._norm_offset
        return self._in_halves(stored.name, stored.shape[0], values)

    def blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """A matrix as it is stored: [out, blocks in a row, bytes of a block]. The rows are the file's."""
        stored = self.stored(name)
        return self._file.raw(stored.name).reshape(stored.shape[0], -1, stored.type.block_bytes)

    def row_order(self, name: str) -> torch.Tensor | None:
        """The file's rows in the order of Hugging Face, where it is another."""
        stored = self.stored(name)
        rows = torch.arange(stored.shape[0])
        ordered = self._in_halves(stored.name, stored.shape[0], rows)
        return None if ordered is rows else ordered

    def forget(self, name: str) -> None:
        self._file.forget(self._gguf_names[name])

    def _in_halves(self, gguf_name: str, num_rows: int, values: torch.Tensor) -> torch.Tensor:
        """llama.cpp turns neighbouring rows, Hugging Face rows half a head apart: undo its interleaving."""
        num_heads = next((heads for part, heads in self._interleaved.items() if f".{part}." in gguf_name), None)
        if num_heads is None:
            return values
        head = num_rows // num_heads
        assert values.shape[0] % head == 0, (gguf_name, values.shape, "is cut inside a head")
        return values.unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2)


def _hf_name(name: str, names: dict[str, str]) -> str:
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer is None:
        return names.get(name, name)
    generic = "blk.{}." + name[layer.end() :]
    return names[generic].format(layer.group(1)) if generic in names else name
