"""StarCoder2: grouped heads that turn, biases and layer norms, a sliding window."""

from __future__ import annotations

from legato.layers.attention import SelfAttention
from legato.layers.mlp import MLP
from legato.layers.rotary import Rotary
from legato.layers.shard import Heads
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, SequentialLayer
from legato.models.weights import Weights


class Starcoder2(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.inner = keys.count("intermediate_size")
        self.eps = keys.number("norm_epsilon", default=1e-5)
        self.activation = keys.text("hidden_act", default="gelu_pytorch_tanh")
        self.bias = keys.flag("use_bias", default=True)
        self.window = 0 if keys.get("sliding_window") is None else keys.count("sliding_window")
        is_tied = keys.flag("tie_word_embeddings", default=True)
        heads = weights.heads(config.num_heads, config.num_kv_heads, config.head_dim)
        rotary = Rotary(config.rope(), config.max_positions, weights.dtype, weights.device)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        self.embedding = weights.embedding("model.embed_tokens", *size)
        self.layers = [
            self._layer(weights, f"model.layers.{i}", heads, rotary) for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = weights.layer_norm("model.norm", config.hidden_size, self.eps)
        self.head = weights.head("lm_head", self.embedding, *size, tied=is_tied)

    def _layer(self, weights: Weights, prefix: str, heads: Heads, rotary: Rotary) -> SequentialLayer:
        hidden, bias = self.config.hidden_size, self.bias
        names = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        return SequentialLayer(
            weights.layer_norm(f"{prefix}.input_layernorm", hidden, self.eps),
            Attention(
                weights.qkv(names, heads, hidden, bias=bias),
                SelfAttention(heads, rotary, window=self.window),
                weights.output(f"{prefix}.self_attn.o_proj", heads, hidden, bias=bias),
            ),
            weights.layer_norm(f"{prefix}.post_attention_layernorm", hidden, self.eps),
            MLP(
                weights.column(f"{prefix}.mlp.c_fc", self.inner, hidden, bias=bias),
                weights.row(f"{prefix}.mlp.c_proj", hidden, self.inner, bias=bias),
                self.activation,
            ),
        )
