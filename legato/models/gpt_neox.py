"""GPT-NeoX: Pythia, Dolly, RedPajama and the 20B. A share of each head turns; attention and MLP are mostly parallel."""

from __future__ import annotations

from legato.layers.attention import SelfAttention
from legato.layers.mlp import MLP
from legato.layers.rotary import Rotary
from legato.layers.shard import Heads
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, Layer, ParallelLayer, SequentialLayer
from legato.models.weights import Weights


class GPTNeoX(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.inner = keys.count("intermediate_size", default=4 * config.hidden_size)
        self.eps = keys.number("layer_norm_eps", default=1e-5)
        self.activation = keys.text("hidden_act", default="gelu")
        self.attention_bias = keys.flag("attention_bias", default=True)
        self.is_parallel = keys.flag("use_parallel_residual", default=True)
        heads = weights.heads(config.num_heads, config.num_heads, config.head_dim)
        rotary = Rotary(config.rope(default_share=0.25), config.max_positions, weights.dtype, weights.device)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        root = weights.prefix("gpt_neox.", "embed_in.weight")
        self.embedding = weights.embedding(f"{root}embed_in", *size)
        self.layers = [
            self._layer(weights, f"{root}layers.{i}", heads, rotary) for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = weights.layer_norm(f"{root}final_layer_norm", config.hidden_size, self.eps)
        head = "embed_out" if "embed_out.weight" in weights else "lm_head"
        self.head = weights.head(head, self.embedding, *size, tied=config.is_tied)

    def _layer(self, weights: Weights, prefix: str, heads: Heads, rotary: Rotary) -> Layer:
        hidden, bias, reduce = self.config.hidden_size, self.attention_bias, not self.is_parallel
        weights.skip(f"{prefix}.attention.bias")  # the causal mask, in Pythia's files
        attention = Attention(
            weights.qkv(f"{prefix}.attention.query_key_value", heads, hidden, bias=bias, layout="grouped"),
            SelfAttention(heads, rotary),
            weights.output(f"{prefix}.attention.dense", heads, hidden, bias=bias, reduce=reduce),
        )
        mlp = MLP(
            weights.column(f"{prefix}.mlp.dense_h_to_4h", self.inner, hidden, bias=True),
            weights.row(f"{prefix}.mlp.dense_4h_to_h", hidden, self.inner, bias=True, reduce=reduce),
            self.activation,
        )
        norm = weights.layer_norm(f"{prefix}.input_layernorm", hidden, self.eps)
        mlp_norm = weights.layer_norm(f"{prefix}.post_attention_layernorm", hidden, self.eps)
        if self.is_parallel:
            return ParallelLayer(norm, attention, mlp_norm, mlp, weights.shard)
        return SequentialLayer(norm, attention, mlp_norm, mlp)
