"""Llama: Llama 1 to 3, Code Llama, SmolLM2 and everything that shares their layout; Mistral and Phi-3 among them.

Many later families are Llama with a few changes. They derive from `Llama`, say in `read` what config.json means to
them, and replace the layer, the embedding or the head where theirs computes something else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from legato.layers.attention import SelfAttention
from legato.layers.mlp import GatedMLP, Product
from legato.layers.norm import RMSNorm
from legato.layers.rotary import RopeConfig, Rotary
from legato.layers.shard import Heads
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Clipped, Decoder, Layer, Norm, SequentialLayer
from legato.models.weights import Weights

# What a Mistral's config.json that does not mention it means; later models say null.
MISTRAL_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What a family reads from config.json: all of it before any weight, so that what is wrong shows at once."""

    hidden_size: int
    intermediate_size: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: str
    # What Llama itself does not have.
    windows: tuple[int, ...] = ()  # for each layer how many keys its queries see, 0: all; (): all in every layer
    is_fused: bool = False  # the checkpoint has q, k and v in one matrix, gate and up in another
    has_head_norms: bool = False  # queries and keys are normed, head by head
    norm_offset: float = 0.0
    scale: float | None = None  # of the attention scores; None: the usual one
    soft_cap: float = 0.0  # of the attention scores
    clip: float = 0.0  # of queries, keys and values; 0: none
    head_bias: bool = False
    has_normed_head: bool = False  # the rows of the head have length one
    has_alibi: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> LlamaShape:
        keys = config.keys
        bias = keys.flag("attention_bias")
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=keys.count("intermediate_size"),
            norm_eps=keys.number("rms_norm_eps", default=1e-6),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=keys.flag("mlp_bias"),
            activation=keys.text("hidden_act", default="silu"),
        )


@dataclass(frozen=True, slots=True)
class LlamaParts:
    """What layers of the family are made of. `name` is that of the part in the checkpoint."""

    shape: LlamaShape
    heads: Heads
    weights: Weights

    def norm(self, name: str, size: int | None = None) -> Norm:
        """Of the hidden state, or of heads of this `size`."""
        weight = self.weights.tensor(f"{name}.weight", (size or self.shape.hidden_size,))
        return RMSNorm(weight, self.shape.norm_eps, self.shape.norm_offset)

    def attention(self, name: str, rotary: Rotary, window: int = 0) -> Attention:
        shape, heads, weights = self.shape, self.heads, self.weights
        names = f"{name}.qkv_proj" if shape.is_fused else [f"{name}.{part}_proj" for part in "qkv"]
        q_norm, k_norm = (
            self.norm(f"{name}.{part}_norm", heads.head_dim) if shape.has_head_norms else None for part in "qk"
        )
        qkv: Product = weights.qkv(names, heads, shape.hidden_size, bias=shape.qkv_bias)
        return Attention(
            Clipped(qkv, shape.clip) if shape.clip else qkv,
            SelfAttention(
                heads, rotary, scale=shape.scale, q_norm=q_norm, k_norm=k_norm, window=window, soft_cap=shape.soft_cap
            ),
            weights.output(f"{name}.o_proj", heads, shape.hidden_size, bias=shape.output_bias),
        )

    def mlp(self, name: str, inner: int | None = None, *, reduce: bool = True) -> GatedMLP:
        """Of the usual width, or of this `inner` one; `reduce` as that of `Weights.row`."""
        weights, bias = self.weights, self.shape.mlp_bias
        hidden, inner = self.shape.hidden_size, inner or self.shape.intermediate_size
        if self.shape.is_fused:
            gate_up = weights.column(f"{name}.gate_up_proj", inner, hidden, bias=bias, fused=2)
        else:
            gate_up = weights.column([f"{name}.gate_proj", f"{name}.up_proj"], inner, hidden, bias=bias)
        down = weights.row(f"{name}.down_proj", hidden, inner, bias=bias, reduce=reduce)
        return GatedMLP(gate_up, down, self.shape.activation)


class LayerNormParts(LlamaParts):
    """With layer norms, which have weights and biases."""

    def norm(self, name: str, size: int | None = None) -> Norm:
        return self.weights.layer_norm(name, size or self.shape.hidden_size, self.shape.norm_eps)


class Llama(Decoder):
    prefix = "model"  # of all names but the head's
    head_name = "lm_head"
    parts: type[LlamaParts] = LlamaParts
    is_tied = False  # unless config.json says otherwise
    num_inputs_only = 0  # tokens behind the vocabulary that are read and never generated

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        shape = self.read(config)
        is_tied = config.keys.flag("tie_word_embeddings", default=self.is_tied)
        heads = weights.heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.rotary = Rotary(self.rope(config), config.max_positions, weights.dtype, weights.device)
        parts = self.parts(shape, heads, weights)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        rows = config.vocab_size + self.num_inputs_only
        self.embedding = weights.embedding(f"{self.prefix}.embed_tokens", rows, config.hidden_size)
        self.layers = [
            self.layer(parts, f"{self.prefix}.layers.{i}", self.rotary, shape.windows[i] if shape.windows else 0)
            for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = parts.norm(f"{self.prefix}.norm")
        self.head = weights.head(
            self.head_name, self.embedding, *size, tied=is_tied, bias=shape.head_bias, normed=shape.has_normed_head
        )

    def limit(self, longest: int) -> None:
        self.rotary.limit(longest)

    def read(self, config: ModelConfig) -> LlamaShape:
        return LlamaShape.of(config)

    def rope(self, config: ModelConfig) -> RopeConfig:
        return config.rope()

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        layer = SequentialLayer(
            parts.norm(f"{name}.input_layernorm"),
            parts.attention(f"{name}.self_attn", rotary, window),
            parts.norm(f"{name}.post_attention_layernorm"),
            self.mlp(parts, name),
        )
        if isinstance(layer.mlp_norm, RMSNorm):
            layer.leave_parts()
        return layer

    def mlp(self, parts: LlamaParts, name: str) -> Product:
        """Of the layer `name`."""
        return parts.mlp(f"{name}.mlp")


class Mistral(Llama):
    """Mistral 7B, Nemo and Small: in the first version with a sliding window."""

    def read(self, config: ModelConfig) -> LlamaShape:
        shape = LlamaShape.of(config)
        if config.keys.raw.get("sliding_window", MISTRAL_WINDOW) is None:
            return shape
        window = config.keys.count("sliding_window", default=MISTRAL_WINDOW)
        return replace(shape, windows=(window,) * config.num_layers)


class Phi3(Llama):
    """Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused matrices, and two sets of frequencies for long contexts."""

    def read(self, config: ModelConfig) -> LlamaShape:
        keys = config.keys
        windows = () if keys.get("sliding_window") is None else (keys.count("sliding_window"),) * config.num_layers
        return replace(
            LlamaShape.of(config),
            norm_eps=keys.number("rms_norm_eps", default=1e-5),
            windows=windows,
            is_fused=True,
        )
