"""T5, T5 1.1, FLAN-T5 and mT5: an encoder reads the prompt, a decoder writes the answer.

A sequence is the prompt and then the decoder's tokens, of which the first is always the same. A step may bring both:
the encoder reads the prompts, every layer of the decoder stores what it will see of them, then the decoder's tokens go
through the layers, those of new prompts beside those of old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from legato.common.errors import UnsupportedModel
from legato.layers.encoder_decoder import (
    CrossAttention,
    DecoderTokens,
    OwnAttention,
    PromptAttention,
    bias_of_both_sides,
    bias_of_the_past,
)
from legato.layers.kv_cache import KVCache, KVShape, LayerCache
from legato.layers.linear import Linear, RowLinear
from legato.layers.mlp import activation_by_name, gate_by_name
from legato.layers.norm import RMSNorm
from legato.layers.shard import Heads
from legato.layers.step import Sides, Step
from legato.models.config import ModelConfig
from legato.models.keys import Keys
from legato.models.weights import Weights

# Of prompt and answer. Positions count only by their distance, and all that are far apart count alike, so there is no
# end to them; `n_positions` in config.json is what T5 was first trained with.
LONGEST = 4096
# The embedding's names; checkpoints that keep it under several have the same in each.
EMBEDDINGS = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")


@dataclass(frozen=True, slots=True)
class T5Shape:
    hidden_size: int
    inner_size: int
    num_encoder_layers: int
    num_decoder_layers: int
    norm_eps: float
    num_buckets: int
    max_distance: int
    activation: str
    is_gated: bool

    @classmethod
    def of(cls, config: ModelConfig) -> T5Shape:
        keys = config.keys
        projection = keys.text("feed_forward_proj", default="relu")
        is_gated = projection.startswith("gated-")
        activation = projection.removeprefix("gated-")
        num_buckets = keys.count("relative_attention_num_buckets", default=32)
        max_distance = keys.count("relative_attention_max_distance", default=128)
        if num_buckets < 4 or max_distance <= num_buckets // 2:
            raise UnsupportedModel(
                f"config.json: relative_attention_num_buckets={num_buckets} must be at least 4 and less than twice "
                f"relative_attention_max_distance={max_distance}"
            )
        return cls(
            hidden_size=config.hidden_size,
            inner_size=keys.count("d_ff"),
            num_encoder_layers=keys.count("num_layers"),
            num_decoder_layers=keys.count("num_decoder_layers", default=keys.count("num_layers")),
            norm_eps=keys.number("layer_norm_epsilon", default=1e-6),
            num_buckets=num_buckets,
            max_distance=max_distance,
            # Where T5 1.1 says gelu it means the approximation.
            activation="gelu_new" if projection == "gated-gelu" else activation,
            is_gated=is_gated,
        )


@dataclass(frozen=True, slots=True)
class T5Parts:
    """What layers are made of. `name` is that of the part in the checkpoint."""

    shape: T5Shape
    heads: Heads
    weights: Weights

    def norm(self, name: str) -> T5Norm:
        weight = self.weights.tensor(f"{name}.layer_norm.weight", (self.shape.hidden_size,))
        return T5Norm(weight, self.shape.norm_eps)

    def qkv(self, name: str) -> Linear:
        return self.weights.qkv([f"{name}.{part}" for part in "qkv"], self.heads, self.shape.hidden_size)

    def some(self, name: str, parts: str) -> Linear:
        """Only queries, or only keys and values: here they are not of the same tokens."""
        names = [f"{name}.{part}" for part in parts]
        return self.weights.per_head(names, self.heads, self.heads.head_dim, self.shape.hidden_size)

    def output(self, name: str) -> RowLinear:
        return self.weights.output(f"{name}.o", self.heads, self.shape.hidden_size)

    def bias(self, name: str) -> torch.Tensor:
        """[num_buckets, our heads], which all layers share."""
        shape = (self.shape.num_buckets, self.heads.all_heads)
        name = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return self.weights.tensor(name, shape, {1: [(self.heads.first, self.heads.last)]}, dtype=torch.float32)


class T5Norm:
    """Of a residual stream that may be wider than what the products read."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.norm = RMSNorm(weight, eps)
        self.dtype = weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).to(self.dtype)


class FeedForward:
    """The last product is in fp32 where the model is in fp16: what trained T5s have there does not fit."""

    def __init__(self, parts: T5Parts, name: str) -> None:
        shape, weights = parts.shape, parts.weights
        hidden, inner, name = shape.hidden_size, shape.inner_size, f"{name}.DenseReluDense"
        names = [f"{name}.wi_0", f"{name}.wi_1"] if shape.is_gated else f"{name}.wi"
        self.activation = (gate_by_name if shape.is_gated else activation_by_name)(shape.activation)
        self.up = weights.column(names, inner, hidden)
        self.dtype = stream_dtype(weights.dtype)
        self.down = weights.row(f"{name}.wo", hidden, inner, dtype=self.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)).to(self.dtype))


class EncoderLayer:
    def __init__(self, parts: T5Parts, name: str, attention: PromptAttention) -> None:
        self.attention = attention
        self.qkv = parts.qkv(f"{name}.layer.0.SelfAttention")
        self.output = parts.output(f"{name}.layer.0.SelfAttention")
        self.mlp = FeedForward(parts, f"{name}.layer.1")
        self.norms = [parts.norm(f"{name}.layer.{i}") for i in range(2)]

    def __call__(self, x: torch.Tensor, step: Step, sides: Sides) -> torch.Tensor:
        x = x + self.output(self.attention(self.qkv(self.norms[0](x)), step, sides))
        return x + self.mlp(self.norms[1](x))


class DecoderLayer:
    def __init__(self, parts: T5Parts, name: str, attention: OwnAttention) -> None:
        own, cross = f"{name}.layer.0.SelfAttention", f"{name}.layer.1.EncDecAttention"
        self.attention = attention
        self.qkv, self.output = parts.qkv(own), parts.output(own)
        self.cross = CrossAttention(parts.heads)
        self.cross_q, self.cross_kv = parts.some(cross, "q"), parts.some(cross, "kv")
        self.cross_output = parts.output(cross)
        self.mlp = FeedForward(parts, f"{name}.layer.2")
        self.norms = [parts.norm(f"{name}.layer.{i}") for i in range(3)]
        parts.weights.skip(f"{cross}.relative_attention_bias.weight")  # early checkpoints have one, which is unused

    def read(self, encoded: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
        """Store this layer's keys and values of the prompts."""
        self.cross.store(self.cross_kv(encoded), cache, slots)

    def __call__(self, x: torch.Tensor, cache: LayerCache, tokens: DecoderTokens) -> torch.Tensor:
        x = x + self.output(self.attention(self.qkv(self.norms[0](x)), cache, tokens))
        x = x + self.cross_output(self.cross(self.cross_q(self.norms[1](x)), cache, tokens))
        return x + self.mlp(self.norms[2](x))


class T5:
    """`scales_output`: the decoder's output is made smaller before the head. Those that do have the embedding for a
    head; others may have a head of their own."""

    can_capture = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        shape, start = T5Shape.of(config), start_token(config)
        scales = self.scales_output(config.keys)
        heads = weights.heads(config.num_heads, config.num_heads, config.head_dim)
        parts = T5Parts(shape, heads, weights)
        self.config = replace(config, max_positions=LONGEST, decoder_start_token_id=start)
        self.kv_shape = KVShape(shape.num_decoder_layers, heads.num_kv_heads, heads.head_dim, weights.dtype)
        self.dtype = stream_dtype(weights.dtype)
        self.scale = shape.hidden_size**-0.5 if scales else 1.0

        size = (config.vocab_size, config.hidden_size)
        name = next((name for name in EMBEDDINGS if f"{name}.weight" in weights), EMBEDDINGS[0])
        self.embedding = weights.embedding(name, *size)
        for other in EMBEDDINGS:
            weights.skip(f"{other}.weight")
        reading = PromptAttention(heads, bias_of_both_sides(parts.bias("encoder"), shape.max_distance))
        self.encoder = [EncoderLayer(parts, f"encoder.block.{i}", reading) for i in range(shape.num_encoder_layers)]
        self.encoder_norm = self._final_norm(parts, "encoder")
        writing = OwnAttention(heads, bias_of_the_past(parts.bias("decoder"), shape.max_distance))
        self.decoder = [DecoderLayer(parts, f"decoder.block.{i}", writing) for i in range(shape.num_decoder_layers)]
        self.norm = self._final_norm(parts, "decoder")
        self.head = weights.head("lm_head", self.embedding, *size, tied=scales)

    def scales_output(self, keys: Keys) -> bool:
        """transformers 5 says so; before, it was what tied embeddings meant."""
        return keys.flag("scale_decoder_outputs", default=keys.flag("tie_word_embeddings", default=True))

    @staticmethod
    def _final_norm(parts: T5Parts, name: str) -> T5Norm:
        weight = parts.weights.tensor(f"{name}.final_layer_norm.weight", (parts.shape.hidden_size,))
        return T5Norm(weight, parts.shape.norm_eps)

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        sides = step.sides
        assert sides is not None, "a step of an encoder-decoder model says whose its tokens are"
        if sides.encoder is not None:
            self._read(step, sides, sides.encoder, cache.layers)
        tokens = DecoderTokens.of(step, sides)
        x = self._embed(tokens.input_ids)
        for layer, layer_cache in zip(self.decoder, cache.layers, strict=True):
            x = layer(x, layer_cache, tokens)
        if sides.decoder is None:
            return step.wanted(x)
        # The prompts' tokens have no hidden state of the decoder's.
        return step.wanted(x.new_zeros(len(step.input_ids), x.shape[1]).index_copy_(0, sides.decoder, x))

    def _read(self, step: Step, sides: Sides, places: torch.Tensor, caches: Sequence[LayerCache]) -> None:
        x = self._embed(step.input_ids[places])
        for layer in self.encoder:
            x = layer(x, step, sides)
        encoded, slots = self.encoder_norm(x), step.slots[places]
        for reader, cache in zip(self.decoder, caches, strict=True):
            reader.read(encoded, cache, slots)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids).to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        return self.head(normed if self.scale == 1.0 else normed * self.scale)


class MT5(T5):
    def scales_output(self, keys: Keys) -> bool:
        """T5 1.1 in many languages: a head of its own, and nothing scaled."""
        return False


def stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the residual stream, which in trained T5s grows beyond fp16."""
    return torch.float32 if dtype == torch.float16 else dtype


def start_token(config: ModelConfig) -> int:
    token = config.keys.get("decoder_start_token_id", "pad_token_id")
    if not isinstance(token, int) or not 0 <= token < config.vocab_size:
        raise UnsupportedModel(
            f"config.json: decoder_start_token_id is {token!r}, not a token id below vocab_size={config.vocab_size}"
        )
    return token
