"""Mixtral: Mistral with experts in place of the MLP. What it builds them with serves other families, too."""

from __future__ import annotations

from dataclasses import dataclass, replace

from legato.common.errors import ModelFileError
from legato.layers.experts import ExpertMLP, ExpertRouter, Experts
from legato.layers.mlp import Product
from legato.layers.rotary import RopeConfig
from legato.models.config import ModelConfig
from legato.models.llama import Llama, LlamaParts, LlamaShape

# Gate, up and down of an expert. Most families call them so.
USUAL_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    num_experts: int
    intermediate_size: int  # of each
    num_chosen: int
    normalise: bool  # the weights of a token's experts sum to one

    def __post_init__(self) -> None:
        if self.num_chosen > self.num_experts:
            raise ModelFileError(f"config.json: a token cannot go to {self.num_chosen} of {self.num_experts} experts")


def read_experts(
    parts: LlamaParts,
    name: str,
    shape: ExpertShape,
    names: tuple[str, str, str] = USUAL_NAMES,
    router: ExpertRouter | None = None,
) -> Experts:
    """Those of the block `name`, which has its router as `gate`; `router` where that is not the usual one."""
    hidden = parts.shape.hidden_size
    router = router or ExpertRouter(
        parts.weights.linear(f"{name}.gate", shape.num_experts, hidden), shape.num_chosen, normalise=shape.normalise
    )
    matrices = parts.weights.experts(f"{name}.experts", shape.num_experts, shape.intermediate_size, hidden, names)
    return Experts(router, *matrices, parts.shape.activation)


class Mixtral(Llama):
    def read(self, config: ModelConfig) -> LlamaShape:
        keys, shape = config.keys, LlamaShape.of(config)
        self.experts = ExpertShape(
            num_experts=keys.count("num_local_experts", "num_experts", default=8),
            intermediate_size=shape.intermediate_size,
            num_chosen=keys.count("num_experts_per_tok", default=2),
            normalise=True,
        )
        window = 0 if keys.get("sliding_window") is None else keys.count("sliding_window")
        return replace(shape, norm_eps=keys.number("rms_norm_eps", default=1e-5), windows=(window,) * config.num_layers)

    def rope(self, config: ModelConfig) -> RopeConfig:
        return config.rope(default_theta=1e6)

    def mlp(self, parts: LlamaParts, name: str) -> Product:
        weights = parts.weights
        published = f"{name}.block_sparse_moe"
        block = published if weights.has_matrix(f"{published}.gate") else f"{name}.mlp"
        return ExpertMLP(read_experts(parts, block, self.experts, ("w1", "w3", "w2")), weights.shard)
