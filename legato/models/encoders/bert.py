"""BERT, RoBERTa and XLM-RoBERTa: absolute positions, a norm behind every sum."""

from __future__ import annotations

import torch

from legato.common.errors import UnsupportedModel
from legato.layers.linear import Linear
from legato.layers.mlp import activation_by_name
from legato.modelfiles.embedding import Pooling
from legato.models.config import ModelConfig
from legato.models.encoders.batch import TextBatch, attend
from legato.models.encoders.pooling import pool
from legato.models.weights import Weights


class BertLayer:
    def __init__(self, config: ModelConfig, weights: Weights, name: str, eps: float) -> None:
        hidden, inner = config.hidden_size, config.keys.count("intermediate_size")
        self._heads, self._dim = config.num_heads, config.head_dim
        attention = f"{name}.attention"
        names = [f"{attention}.self.{part}" for part in ("query", "key", "value")]
        self._qkv = weights.linear(names, hidden, hidden, bias=True)
        self._output = weights.linear(f"{attention}.output.dense", hidden, hidden, bias=True)
        self._norm = weights.layer_norm(f"{attention}.output.LayerNorm", hidden, eps)
        self._up = weights.linear(f"{name}.intermediate.dense", inner, hidden, bias=True)
        self._activate = activation_by_name(config.keys.text("hidden_act", default="gelu"))
        self._down = weights.linear(f"{name}.output.dense", hidden, inner, bias=True)
        self._last_norm = weights.layer_norm(f"{name}.output.LayerNorm", hidden, eps)

    def __call__(self, x: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        q, k, v = self._qkv(x).view(-1, 3, self._heads, self._dim).unbind(1)
        x = self._norm(self._output(attend(q, k, v, batch)).add_(x))
        return self._last_norm(self._down(self._activate(self._up(x))).add_(x))


class Bert:
    prefix = "bert."
    default_pooling: Pooling = "mean"

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys, hidden = config.keys, config.hidden_size
        if (kind := keys.text("position_embedding_type", default="absolute")) != "absolute":
            raise UnsupportedModel(f"config.json: position_embedding_type '{kind}' is not supported; known: absolute")
        eps = keys.number("layer_norm_eps", default=1e-12)
        self.hidden_size, self.vocab_size = hidden, config.vocab_size
        self.first_position = self._first_position(config)
        self.max_tokens = config.max_positions - self.first_position
        prefix = weights.prefix(self.prefix, "embeddings.word_embeddings.weight")
        name = f"{prefix}embeddings"
        self._words = weights.tensor(f"{name}.word_embeddings.weight", (config.vocab_size, hidden))
        self._positions = weights.tensor(f"{name}.position_embeddings.weight", (config.max_positions, hidden))
        self._num_types = keys.count("type_vocab_size", default=2)
        self._types = weights.tensor(f"{name}.token_type_embeddings.weight", (self._num_types, hidden))
        self._norm = weights.layer_norm(f"{name}.LayerNorm", hidden, eps)
        self._layers = [BertLayer(config, weights, f"{prefix}encoder.layer.{i}", eps) for i in range(config.num_layers)]
        self._prefix = prefix
        weights.skip(f"{name}.position_ids")
        weights.skip_below("cls")
        weights.skip_below("lm_head")

    def _first_position(self, config: ModelConfig) -> int:
        return 0

    def forward(self, batch: TextBatch) -> torch.Tensor:
        """[T, hidden]"""
        x = self._words[batch.input_ids] + self._positions[batch.positions + self.first_position]
        x += self._types[batch.type_ids] if self._num_types > 1 else self._types[0]
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x, batch)
        return x

    def classifier(self, weights: Weights, num_labels: int) -> BertClassifier:
        hidden = self.hidden_size
        pooler = weights.linear(f"{self._prefix}pooler.dense", hidden, hidden, bias=True)
        return BertClassifier(pooler, weights.linear("classifier", num_labels, hidden, bias=True), num_labels)

    def skip_unused(self, weights: Weights) -> None:
        """Of a model that embeds."""
        weights.skip_below(f"{self._prefix}pooler")
        weights.skip_below("classifier")


class Roberta(Bert):
    """Positions are counted from behind the number of the padding token."""

    prefix = "roberta."

    def _first_position(self, config: ModelConfig) -> int:
        return int(config.keys.number("pad_token_id", default=1)) + 1

    def classifier(self, weights: Weights, num_labels: int) -> BertClassifier:
        weights.skip_below(f"{self._prefix}pooler")
        hidden = self.hidden_size
        dense = weights.linear("classifier.dense", hidden, hidden, bias=True)
        return BertClassifier(dense, weights.linear("classifier.out_proj", num_labels, hidden, bias=True), num_labels)


class BertClassifier:
    """The first token's vector, through a matrix and a tanh, to the logits of the labels."""

    def __init__(self, dense: Linear, output: Linear, num_labels: int) -> None:
        self._dense = dense
        self._output = output
        self.size = num_labels

    def __call__(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        return self._output(torch.tanh(self._dense(pool(hidden, batch, "cls"))))
