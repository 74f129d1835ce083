"""A GGUF file is the same model as the checkpoint it was made from, in every family that has one.

The files are written as llama.cpp's converter does: its names (from its own table), its norms, its order of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from legato.common.errors import UnsupportedModel
from legato.modelfiles.files import ModelFiles, read_json
from tests.models import tiny_seeds as seeds
from tests.models import tiny_today as today
from tests.models.answers import prompts, step_logits
from tests.server.local import load

# Layers alternate as they do in the published models: the file has no list.
GEMMA2_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPE = {"full_attention": dict(rope_type="default", rope_theta=50_000.0),
               "sliding_attention": dict(rope_type="default", rope_theta=10_000.0)}  # fmt: skip
CASES: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "qwen2": (today.tiny_qwen2, {}),
    "qwen3": (today.tiny_qwen3, {}),
    "gemma": (today.tiny_gemma, {}),
    "gemma2": (today.tiny_gemma2, dict(layer_types=GEMMA2_LAYERS, query_pre_attn_scalar=24)),
    "gemma3": (today.tiny_gemma3, dict(layer_types=["sliding_attention"] * 3, query_pre_attn_scalar=24,
               rope_parameters=GEMMA3_ROPE)),
    "olmo2": (today.tiny_olmo2, {}),
    "granite": (today.tiny_granite, dict(attention_bias=True, mlp_bias=True)),
    # Files have no word for the window: it is that of all published ones, longer than any text here.
    "starcoder2": (seeds.tiny_starcoder2, dict(sliding_window=4096)),
    "phi3": (today.tiny_phi3, dict(original_max_position_embeddings=256, rope_parameters=today.long_rope(8))),
}  # fmt: skip


@pytest.mark.parametrize("architecture", CASES)
def test_a_gguf_file_is_the_model_it_was_made_from(architecture: str, tmp_path: Path) -> None:
    make, changes = CASES[architecture]
    folder = make(tmp_path / "folder", **changes)
    file = convert(folder, architecture, tmp_path / "model.gguf")
    asked = prompts(320)
    for ours, theirs in zip(step_logits(load(file), asked), step_logits(load(folder), asked), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_olmo_3_is_not_taken_for_olmo_2(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "olmo2")
    writer.add_sliding_window(4096)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"model\.gguf: OLMo 3.* is not supported"):
        ModelFiles.open(tmp_path / "model.gguf").config()


def convert(folder: Path, architecture: str, path: Path) -> Path:
    config, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, architecture, config)
    _write_tokens(writer, folder)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"])
    for name, tensor in tensors.items():
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture == "granite" and (part := name.split(".")[-2]) in heads:
            tensor = neighbours(tensor, heads[part])
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    rope = config.get("rope_parameters", {})
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            factors = torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def neighbours(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The order that llama.cpp turns by: a row of the first half of a head, then the one of the second half."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _write_sizes(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if "norm_epsilon" in config:
        writer.add_layer_norm_eps(config["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_rope_dimension_count(head_dim)


def _write_tokens(writer: gguf.GGUFWriter, folder: Path) -> None:
    vocabulary = ModelFiles.open(folder).tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
