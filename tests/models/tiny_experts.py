"""Tiny random checkpoints of the families with experts, as transformers writes them: one matrix for each expert, which
is also how they are published. `fused` makes of them what transformers has in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.models.tiny_seeds import Tensors, rewrite, write

# Widths are multiples of four, as transformers wants those of experts to be; parts of them need not be.
COMMON: dict[str, Any] = dict(
    hidden_size=96, intermediate_size=68, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=256, spread=0.2,
)  # fmt: skip
# From 32 to 256 positions.
STRETCH: dict[str, Any] = dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1,
    mscale=0.707, mscale_all_dim=0.707, rope_theta=10_000.0,
)  # fmt: skip
QWEN: dict[str, Any] = dict(COMMON, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=44)


def tiny_mixtral(folder: Path, **changes: Any) -> Path:
    return write(folder, "mixtral", dict(COMMON, num_local_experts=5), changes)


def tiny_qwen2_moe(folder: Path, **changes: Any) -> Path:
    return write(folder, "qwen2_moe", dict(QWEN, shared_expert_intermediate_size=50), changes)


def tiny_qwen3_moe(folder: Path, **changes: Any) -> Path:
    return write(folder, "qwen3_moe", dict(QWEN, head_dim=24), changes)


def tiny_deepseek(folder: Path, **changes: Any) -> Path:
    """The layout of V2-Lite: a dense layer first, queries straight from the hidden state."""
    settings = dict(
        COMMON, num_key_value_heads=6, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=44, n_shared_experts=2,
        first_k_dense_replace=1, routed_scaling_factor=1.5, rope_parameters=STRETCH,
    )  # fmt: skip
    return write(folder, "deepseek_v2", settings, changes)


def fused(make: Callable[..., Path], gate: str, up: str, down: str, block: str = "mlp") -> Callable[..., Path]:
    """All experts of a layer in two tensors, under the block `mlp`."""

    def change(tensors: Tensors) -> Tensors:
        done = {name.replace(f".{block}.", ".mlp."): tensor for name, tensor in tensors.items()}
        first = f".experts.0.{gate}.weight"
        for place in [name.removesuffix(first) for name in done if name.endswith(first)]:
            num_experts = sum(name.startswith(f"{place}.experts.") for name in done) // 3
            gates, ups, downs = (
                torch.stack([done.pop(f"{place}.experts.{i}.{part}.weight") for i in range(num_experts)])
                for part in (gate, up, down)
            )
            done[f"{place}.experts.gate_up_proj"] = torch.cat((gates, ups), dim=1)
            done[f"{place}.experts.down_proj"] = downs
        return done

    return lambda folder, **changes: rewrite(make(folder, **changes), change)
