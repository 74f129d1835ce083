"""MPT with the options that transformers' port left out, as the code it was trained with defines them: norms on queries
and keys, shared key heads, learned positions, biases, scaled logits. test_mpt.py holds it against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.tiny_models import write_tokenizer

Tensors = dict[str, torch.Tensor]


def tiny_mpt_with(folder: Path, *, attention: dict[str, Any], vocab_size: int = 320, **changes: Any) -> Path:
    """A checkpoint as that code saves it; transformers can neither write nor read one."""
    hidden, heads, layers = 96, 6, 3
    config = dict(
        model_type="mpt", d_model=hidden, n_heads=heads, n_layers=layers, max_seq_len=256, vocab_size=vocab_size,
        attn_config=attention, **changes,
    )  # fmt: skip
    kv_size = _num_kv_heads(config) * hidden // heads
    inner = int(changes.get("expansion_ratio", 4) * hidden)
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocab_size, hidden), "norm_f": (hidden,)}
    if not attention.get("alibi", True) and changes.get("learned_pos_emb", True):
        shapes["wpe"] = (256, hidden)
    for i in range(layers):
        block = {"norm_1": (hidden,), "attn.Wqkv": (hidden + 2 * kv_size, hidden), "attn.out_proj": (hidden, hidden)}
        block |= {"norm_2": (hidden,), "ffn.up_proj": (inner, hidden), "ffn.down_proj": (hidden, inner)}
        if attention.get("qk_ln"):
            block |= {"attn.q_ln": (hidden,), "attn.k_ln": (kv_size,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator) * 0.3
        if len(shape) == 1:
            weight += 1.0
        else:
            weight -= weight.mean(0) + weight.mean(1, keepdim=True)  # as in tiny_seeds.write
        tensors[f"transformer.{name}.weight"] = weight
        if not changes.get("no_bias", True) and name not in ("wte", "wpe"):
            tensors[f"transformer.{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def _num_kv_heads(config: dict[str, Any]) -> int:
    attention = config["attn_config"]
    kinds = dict(multiquery_attention=1, grouped_query_attention=attention.get("kv_n_heads"))
    return int(kinds.get(attention.get("attn_type"), config["n_heads"]))


def mpt_logits(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return [_logits(config, tensors, torch.tensor(ids)) for ids in sequences]


def _logits(config: dict[str, Any], tensors: Tensors, ids: torch.Tensor) -> torch.Tensor:
    x = tensors["wte.weight"][ids]
    if "wpe.weight" in tensors:
        x = x + tensors["wpe.weight"][: len(ids)]
    for i in range(config["n_layers"]):
        block = {k.removeprefix(f"blocks.{i}."): t for k, t in tensors.items() if k.startswith(f"blocks.{i}.")}
        x = x + _attend(config, block, _norm(block, "norm_1", x))
        x = x + _linear(block, "ffn.down_proj", F.gelu(_linear(block, "ffn.up_proj", _norm(block, "norm_2", x))))
    logits = _norm(tensors, "norm_f", x) @ tensors["wte.weight"].t()
    scale = config.get("logit_scale") or 1.0
    return logits * (1 / math.sqrt(config["d_model"]) if scale == "inv_sqrt_d_model" else scale)


def _attend(config: dict[str, Any], block: Tensors, x: torch.Tensor) -> torch.Tensor:
    options, heads = config["attn_config"], config["n_heads"]
    size = config["d_model"] // heads
    kv_heads = _num_kv_heads(config)
    qkv = _linear(block, "attn.Wqkv", x)
    if options.get("clip_qkv"):
        qkv = qkv.clamp(-options["clip_qkv"], options["clip_qkv"])
    q, k, v = qkv.split((heads * size, kv_heads * size, kv_heads * size), dim=-1)
    if options.get("qk_ln"):
        q, k = _norm(block, "attn.q_ln", q), _norm(block, "attn.k_ln", k)
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(0, 1) for part in (q, k, v))
    k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
    scores = q @ k.transpose(1, 2) * (options.get("softmax_scale") or 1 / math.sqrt(size))
    distance = torch.arange(len(x)) - torch.arange(len(x))[:, None]
    if options.get("alibi", True):
        scores = scores + _slopes(heads, options.get("alibi_bias_max", 8))[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return _linear(block, "attn.out_proj", mixed)


def _slopes(heads: int, bias_max: float) -> torch.Tensor:
    above = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-bias_max * (i + 1) / above) for i in range(above)]
    return torch.tensor(slopes if above == heads else (slopes[1::2] + slopes[::2])[:heads])


def _linear(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def _norm(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
