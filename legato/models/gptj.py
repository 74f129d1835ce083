"""GPT-J and CodeGen: part of each head turns, neighbour by neighbour; attention and MLP read one norm."""

from __future__ import annotations

from legato.common.errors import UnsupportedModel
from legato.layers.attention import SelfAttention
from legato.layers.linear import Linear
from legato.layers.mlp import MLP
from legato.layers.rotary import Rotary
from legato.layers.shard import Heads
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, ParallelLayer
from legato.models.weights import Weights


class GPTJ(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.rotary_dim = keys.count("rotary_dim", default=64)
        self.inner = keys.count("n_inner", default=4 * config.hidden_size)
        self.eps = keys.number("layer_norm_epsilon", default=1e-5)
        self.activation = keys.text("activation_function", default="gelu_new")
        heads = weights.heads(config.num_heads, config.num_heads, config.head_dim)
        rotary = Rotary(config.rope(dim=self.rotary_dim), config.max_positions, weights.dtype, weights.device)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        root = weights.prefix("transformer.", "wte.weight")
        self.embedding = weights.embedding(f"{root}wte", *size)
        self.layers = [
            self._layer(weights, f"{root}h.{i}", heads, rotary) for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = weights.layer_norm(f"{root}ln_f", config.hidden_size, self.eps)
        self.head = weights.head("lm_head", self.embedding, *size, tied=config.is_tied, bias=True)

    def _layer(self, weights: Weights, prefix: str, heads: Heads, rotary: Rotary) -> ParallelLayer:
        hidden, inner = self.config.hidden_size, self.inner
        return ParallelLayer(
            weights.layer_norm(f"{prefix}.ln_1", hidden, self.eps),
            Attention(
                self._qkv(weights, f"{prefix}.attn", heads),
                SelfAttention(heads, rotary),
                weights.output(f"{prefix}.attn.out_proj", heads, hidden, reduce=False),
            ),
            None,
            MLP(
                weights.column(f"{prefix}.mlp.fc_in", inner, hidden, bias=True),
                weights.row(f"{prefix}.mlp.fc_out", hidden, inner, bias=True, reduce=False),
                self.activation,
            ),
            weights.shard,
        )

    def _qkv(self, weights: Weights, prefix: str, heads: Heads) -> Linear:
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        return weights.qkv(names, heads, self.config.hidden_size, neighbours=self.rotary_dim)


class CodeGen(GPTJ):
    """Its projections are in one matrix, in the order of the four processors that it was trained on."""

    def _qkv(self, weights: Weights, prefix: str, heads: Heads) -> Linear:
        if heads.all_heads % 4:
            raise UnsupportedModel(
                f"CodeGen with {heads.all_heads} heads is not supported: they must be a multiple of 4"
            )
        weights.skip(f"{prefix}.causal_mask")  # in the published files
        hidden = self.config.hidden_size
        return weights.qkv(f"{prefix}.qkv_proj", heads, hidden, layout="quarters", neighbours=self.rotary_dim)
