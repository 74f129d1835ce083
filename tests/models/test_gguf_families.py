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

from legato.common.model_files import ModelFiles, read_json
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


def convert(folder: Path, architecture: str, path: Path) -> Path:
    config, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, architecture, config)
    _write_tokens(writer, folder)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"])
    for name, tensor in tensors.items():
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
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
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_rope_dimension_count(head_dim)


def _write_tokens(writer: gguf.GGUFWriter, folder: Path) -> None:
    vocabulary = ModelFiles.open(folder).tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
