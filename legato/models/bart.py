"""BART and Pegasus: an encoder reads the prompt, a decoder writes the answer, as in T5; but with positions that are
added to the embeddings, layer norms, biases, and scaled scores.

BART's positions are learned and its norms come behind each sum; Pegasus' are sines and cosines, and its norms come
before. Prompt and answer have positions of their own. Together they may be as long as one table of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from legato.layers.encoder_decoder import CrossAttention, DecoderTokens, OwnAttention, PromptAttention
from legato.layers.kv_cache import KVCache, KVShape, LayerCache
from legato.layers.linear import Linear, RowLinear
from legato.layers.mlp import MLP
from legato.layers.norm import LayerNorm
from legato.layers.positions import LearnedPositions
from legato.layers.shard import Heads
from legato.layers.step import Sides, Step
from legato.models.config import ModelConfig
from legato.models.t5 import start_token
from legato.models.weights import Weights

NORM_EPS = 1e-5
FIRST_POSITION = 2  # the row of a learned table that position 0 has


@dataclass(frozen=True, slots=True)
class BartShape:
    hidden_size: int
    num_positions: int
    num_layers: int  # of the decoder
    num_heads: int
    inner_size: int
    num_encoder_layers: int
    num_encoder_heads: int
    encoder_inner_size: int
    activation: str
    embedding_factor: float

    @classmethod
    def of(cls, config: ModelConfig) -> BartShape:
        keys = config.keys
        return cls(
            hidden_size=config.hidden_size,
            num_positions=keys.count("max_position_embeddings", default=1024),
            num_layers=keys.count("decoder_layers", default=12),
            num_heads=keys.count("decoder_attention_heads", default=16),
            inner_size=keys.count("decoder_ffn_dim", default=4096),
            num_encoder_layers=keys.count("encoder_layers", default=12),
            num_encoder_heads=keys.count("encoder_attention_heads", default=16),
            encoder_inner_size=keys.count("encoder_ffn_dim", default=4096),
            activation=keys.text("activation_function", default="gelu"),
            embedding_factor=config.hidden_size**0.5 if keys.flag("scale_embedding") else 1.0,
        )


@dataclass(frozen=True, slots=True)
class BartParts:
    """What the layers of one side are made of. `name` is that of the part in the checkpoint."""

    shape: BartShape
    heads: Heads
    inner_size: int
    weights: Weights
    is_normed_before: bool

    @property
    def scale(self) -> float:
        """Of the queries: scores are dot products and nothing else."""
        return float(self.heads.head_dim**-0.5)

    def norm(self, name: str) -> LayerNorm:
        return self.weights.layer_norm(name, self.shape.hidden_size, NORM_EPS)

    def qkv(self, name: str) -> Linear:
        names = [f"{name}.{part}_proj" for part in "qkv"]
        return self.weights.qkv(names, self.heads, self.shape.hidden_size, bias=True)

    def some(self, name: str, parts: str) -> Linear:
        """Only queries, or only keys and values: here they are not of the same tokens."""
        names = [f"{name}.{part}_proj" for part in parts]
        return self.weights.per_head(names, self.heads, self.heads.head_dim, self.shape.hidden_size, bias=True)

    def output(self, name: str) -> RowLinear:
        return self.weights.output(f"{name}.out_proj", self.heads, self.shape.hidden_size, bias=True)

    def mlp(self, name: str) -> MLP:
        weights, hidden = self.weights, self.shape.hidden_size
        return MLP(
            weights.column(f"{name}.fc1", self.inner_size, hidden, bias=True),
            weights.row(f"{name}.fc2", hidden, self.inner_size, bias=True),
            self.shape.activation,
        )


class BartEncoderLayer:
    def __init__(self, parts: BartParts, name: str) -> None:
        self.parts = parts
        self.attention = PromptAttention(parts.heads, None)
        self.qkv, self.output = parts.qkv(f"{name}.self_attn"), parts.output(f"{name}.self_attn")
        self.mlp = parts.mlp(name)
        self.norm, self.mlp_norm = (parts.norm(f"{name}.{part}_layer_norm") for part in ("self_attn", "final"))

    def __call__(self, x: torch.Tensor, step: Step, sides: Sides) -> torch.Tensor:
        if self.parts.is_normed_before:
            x = x + self._attend(self.norm(x), step, sides)
            return x + self.mlp(self.mlp_norm(x))
        x = self.norm(x + self._attend(x, step, sides))
        return self.mlp_norm(x + self.mlp(x))

    def _attend(self, x: torch.Tensor, step: Step, sides: Sides) -> torch.Tensor:
        qkv = self.qkv(x)
        qkv[:, : qkv.shape[1] // 3].mul_(self.parts.scale)
        return self.output(self.attention(qkv, step, sides))


class BartDecoderLayer:
    def __init__(self, parts: BartParts, name: str) -> None:
        own, cross = f"{name}.self_attn", f"{name}.encoder_attn"
        self.parts = parts
        self.attention, self.cross = OwnAttention(parts.heads, None), CrossAttention(parts.heads)
        self.qkv, self.output = parts.qkv(own), parts.output(own)
        self.cross_q, self.cross_kv = parts.some(cross, "q"), parts.some(cross, "kv")
        self.cross_output = parts.output(cross)
        self.mlp = parts.mlp(name)
        kinds = ("self_attn", "encoder_attn", "final")
        self.norms = [parts.norm(f"{name}.{kind}_layer_norm") for kind in kinds]

    def read(self, encoded: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
        """Store this layer's keys and values of the prompts."""
        self.cross.store(self.cross_kv(encoded), cache, slots)

    def __call__(self, x: torch.Tensor, cache: LayerCache, tokens: DecoderTokens) -> torch.Tensor:
        own, cross, last = self.norms
        if self.parts.is_normed_before:
            x = x + self._attend(own(x), cache, tokens)
            x = x + self._look_back(cross(x), cache, tokens)
            return x + self.mlp(last(x))
        x = own(x + self._attend(x, cache, tokens))
        x = cross(x + self._look_back(x, cache, tokens))
        return last(x + self.mlp(x))

    def _attend(self, x: torch.Tensor, cache: LayerCache, tokens: DecoderTokens) -> torch.Tensor:
        qkv = self.qkv(x)
        qkv[:, : qkv.shape[1] // 3].mul_(self.parts.scale)
        return self.output(self.attention(qkv, cache, tokens))

    def _look_back(self, x: torch.Tensor, cache: LayerCache, tokens: DecoderTokens) -> torch.Tensor:
        """At the prompt."""
        return self.cross_output(self.cross(self.cross_q(x).mul_(self.parts.scale), cache, tokens))


class Bart:
    can_capture = True
    is_normed_before = False

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        shape = self.shape = BartShape.of(config)
        heads, encoder_heads = (
            weights.heads(count, count, shape.hidden_size // count)
            for count in (shape.num_heads, shape.num_encoder_heads)
        )
        self.config = replace(
            config,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_heads,
            head_dim=heads.head_dim,
            max_positions=shape.num_positions,
            decoder_start_token_id=start_token(config),
        )
        self.kv_shape = KVShape(shape.num_layers, heads.num_kv_heads, heads.head_dim, weights.dtype)
        root = weights.prefix("model.", "encoder.layers.0.fc1.weight")
        encoder = BartParts(shape, encoder_heads, shape.encoder_inner_size, weights, self.is_normed_before)
        decoder = replace(encoder, heads=heads, inner_size=shape.inner_size)
        size = (config.vocab_size, config.hidden_size)
        names = [f"{root}{name}" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
        self.embedding = weights.embedding(
            next((name for name in names if f"{name}.weight" in weights), names[0]), *size
        )
        for name in names:
            weights.skip(f"{name}.weight")
        self.positions = [self._positions(weights, f"{root}{side}") for side in ("encoder", "decoder")]
        self.first_norms, self.last_norms = (
            [self._norm(encoder, f"{root}{side}", place) for side in ("encoder", "decoder")]
            for place in ("first", "last")
        )
        self.encoder = [BartEncoderLayer(encoder, f"{root}encoder.layers.{i}") for i in range(shape.num_encoder_layers)]
        self.decoder = [BartDecoderLayer(decoder, f"{root}decoder.layers.{i}") for i in range(shape.num_layers)]
        self.head = weights.head(
            "lm_head", self.embedding, *size, tied=config.keys.flag("tie_word_embeddings", default=True)
        )
        self.logits_bias: torch.Tensor | None = None
        if "final_logits_bias" in weights:
            self.logits_bias = weights.tensor("final_logits_bias", (1, config.vocab_size))

    def _positions(self, weights: Weights, side: str) -> LearnedPositions:
        rows = self.shape.num_positions + FIRST_POSITION
        table = weights.tensor(f"{side}.embed_positions.weight", (rows, self.shape.hidden_size))
        return LearnedPositions(table, offset=FIRST_POSITION)

    def _norm(self, parts: BartParts, side: str, place: str) -> LayerNorm | None:
        """Of the embeddings, or behind the last layer."""
        return parts.norm(f"{side}.layernorm_embedding") if place == "first" else None

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        sides = step.sides
        assert sides is not None, "a step of an encoder-decoder model says whose its tokens are"
        if sides.encoder is not None:
            self._read(step, sides, sides.encoder, cache.layers)
        tokens = DecoderTokens.of(step, sides)
        x = self._embed(tokens.input_ids, (tokens.ends - 1 - tokens.encoder_lens).long(), 1)
        for layer, layer_cache in zip(self.decoder, cache.layers, strict=True):
            x = layer(x, layer_cache, tokens)
        if sides.decoder is None:
            return step.wanted(x)
        # The prompts' tokens have no hidden state of the decoder's.
        return step.wanted(x.new_zeros(len(step.input_ids), x.shape[1]).index_copy_(0, sides.decoder, x))

    def _read(self, step: Step, sides: Sides, places: torch.Tensor, caches: Sequence[LayerCache]) -> None:
        x = self._embed(step.input_ids[places], step.positions[places], 0)
        for layer in self.encoder:
            x = layer(x, step, sides)
        norm, slots = self.last_norms[0], step.slots[places]
        encoded = x if norm is None else norm(x)
        for reader, cache in zip(self.decoder, caches, strict=True):
            reader.read(encoded, cache, slots)

    def _embed(self, ids: torch.Tensor, positions: torch.Tensor, side: int) -> torch.Tensor:
        """`side` is 0 for the encoder, 1 for the decoder."""
        norm = self.first_norms[side]
        x = self.embedding(ids) * self.shape.embedding_factor + self.positions[side](positions)
        return x if norm is None else norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        norm = self.last_norms[1]
        logits = self.head(hidden if norm is None else norm(hidden))
        return logits if self.logits_bias is None else logits + self.logits_bias


class Pegasus(Bart):
    is_normed_before = True

    def _positions(self, weights: Weights, side: str) -> LearnedPositions:
        """Sines in the first half, cosines in the second; files that have the table need not be read."""
        weights.skip(f"{side}.embed_positions.weight")
        count, width = self.shape.num_positions, self.shape.hidden_size
        powers = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = torch.arange(count, dtype=torch.float64)[:, None] / 10_000.0**powers
        table = torch.cat((angles.sin(), angles[:, : width // 2].cos()), dim=1)
        return LearnedPositions(table.to(device=weights.device, dtype=weights.dtype))

    def _norm(self, parts: BartParts, side: str, place: str) -> LayerNorm | None:
        return parts.norm(f"{side}.layer_norm") if place == "last" else None
