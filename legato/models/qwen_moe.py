"""Qwen 1.5, 2 and 3 with experts in some layers or in all; until Qwen 2 with a gated one beside them that all read."""

from __future__ import annotations

from dataclasses import replace

from legato.common.errors import ModelFileError
from legato.layers.experts import ExpertMLP
from legato.layers.mlp import Product
from legato.models.config import ModelConfig
from legato.models.llama import Llama, LlamaParts, LlamaShape
from legato.models.mixtral import ExpertShape, read_experts


class QwenExperts(Llama):
    """Which layers have experts, and how many: the same in both generations."""

    # What a config.json that does not mention it means.
    num_experts = 60
    num_chosen = 4
    expert_size = 1408

    def read(self, config: ModelConfig) -> LlamaShape:
        keys = config.keys
        self.experts = ExpertShape(
            num_experts=keys.count("num_experts", "num_local_experts", default=self.num_experts),
            intermediate_size=keys.count("moe_intermediate_size", default=self.expert_size),
            num_chosen=keys.count("num_experts_per_tok", default=self.num_chosen),
            normalise=keys.flag("norm_topk_prob"),
        )
        every = keys.count("decoder_sparse_step", default=1)
        dense = keys.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise ModelFileError(f"config.json: 'mlp_only_layers' is {dense!r}, not a list of layers")
        self.dense_layers = {
            f"{self.prefix}.layers.{i}" for i in range(config.num_layers) if i in dense or (i + 1) % every
        }
        return LlamaShape.of(config)

    def mlp(self, parts: LlamaParts, name: str) -> Product:
        if name in self.dense_layers:
            return super().mlp(parts, name)
        return self.expert_mlp(parts, f"{name}.mlp")

    def expert_mlp(self, parts: LlamaParts, name: str) -> ExpertMLP:
        return ExpertMLP(read_experts(parts, name, self.experts), parts.weights.shard)


class Qwen2Moe(QwenExperts):
    def read(self, config: ModelConfig) -> LlamaShape:
        keys, shape = config.keys, super().read(config)
        self.shared_size = keys.count("shared_expert_intermediate_size", default=5632)
        windows: tuple[int, ...] = ()
        if keys.flag("use_sliding_window"):
            most = keys.number("max_window_layers", default=28)
            windows = config.windows(
                keys.count("sliding_window", default=4096), lambda layer: layer % 2 == 0 and layer < most
            )
        return replace(shape, qkv_bias=keys.flag("qkv_bias", default=True), output_bias=False, windows=windows)

    def expert_mlp(self, parts: LlamaParts, name: str) -> ExpertMLP:
        weights = parts.weights
        return ExpertMLP(
            read_experts(parts, name, self.experts),
            weights.shard,
            parts.mlp(f"{name}.shared_expert", self.shared_size, reduce=False),
            weights.linear(f"{name}.shared_expert_gate", 1, parts.shape.hidden_size),
        )


class Qwen3Moe(QwenExperts):
    num_experts = 128
    num_chosen = 8
    expert_size = 768

    def read(self, config: ModelConfig) -> LlamaShape:
        keys = config.keys
        window = keys.count("sliding_window", default=4096) if keys.flag("use_sliding_window") else 0
        return replace(super().read(config), has_head_norms=True, windows=(window,) * config.num_layers)
