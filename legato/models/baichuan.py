"""Baichuan and Baichuan 2: Llama with the three projections in one matrix.

The 7B turns its heads, the 13B has ALiBi. Baichuan 2 norms the rows of its head, which its configuration does not
mention: it is known by its vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from legato.layers.attention import SelfAttention
from legato.layers.positions import alibi_slopes
from legato.layers.rotary import Rotary
from legato.models.config import ModelConfig
from legato.models.decoder import Attention
from legato.models.llama import Llama, LlamaParts, LlamaShape

BAICHUAN_2_VOCABULARY = 125_696


class BaichuanParts(LlamaParts):
    def attention(self, name: str, rotary: Rotary, window: int = 0) -> Attention:
        weights, heads, hidden, has_alibi = self.weights, self.heads, self.shape.hidden_size, self.shape.has_alibi
        slopes = alibi_slopes(heads, weights.device) if has_alibi else None
        return Attention(
            weights.qkv(f"{name}.W_pack", heads, hidden),
            SelfAttention(heads, None if has_alibi else rotary, slopes=slopes),
            weights.output(f"{name}.o_proj", heads, hidden),
        )


class Baichuan(Llama):
    parts = BaichuanParts

    def read(self, config: ModelConfig) -> LlamaShape:
        return replace(
            LlamaShape.of(config),
            # The 13B's configuration has `model_max_length` in place of it.
            has_alibi=config.keys.get("max_position_embeddings") is None,
            has_normed_head=config.vocab_size == BAICHUAN_2_VOCABULARY,
        )
