"""The numbers of a config.json that decide about memory, under whichever names the architecture has for them.

What is common to all models is read as they read it. What a model class reads for itself is read here once more,
because those bring in torch; tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from legato.models.catalogue import CATALOGUE
from legato.models.keys import Keys
from legato.models.sizes import Sizes
from legato.server.capacity import LAYER_GRAPH_BYTES
from legato.server.graphs.captures import kept_rows

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3fn": 1, "fp8_e5m2": 1}
# Copies of the logits in float32 that sampling with filters and penalties makes.
SAMPLING_COPIES = 6
FALCONS = {"falcon", "RefinedWeb", "RefinedWebModel"}
GEMMA3 = {"gemma3", "gemma3_text"}
# Whose head is the embedding unless config.json says otherwise.
TIED = FALCONS | GEMMA3 | {"bloom", "gemma", "gemma2", "gpt2", "gpt_bigcode", "mpt", "opt", "starcoder2", "t5"}
# Whose MLP is two matrices; that of all others has a gate, which is a third.
WITHOUT_GATE = FALCONS | {"bloom", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "starcoder2"}


# How the tensors begin with which models see.
EYES = ("visual.", "vision_tower.", "multi_modal_projector.", "image_newline")


@dataclass(frozen=True, slots=True)
class Experts:
    """Of one layer."""

    count: int
    inner: int  # the width of each
    chosen: int  # by a token

    @classmethod
    def of(cls, keys: Keys, inner: int) -> Experts | None:
        count = keys.get("num_local_experts", "num_experts", "n_routed_experts")
        if not isinstance(count, int) or count < 1:
            return None
        width = keys.count("moe_intermediate_size", default=inner)
        return cls(count, width, keys.count("num_experts_per_tok", default=2))


@dataclass(frozen=True, slots=True)
class Shape:
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    is_tied: bool
    has_gate: bool
    experts: Experts | None
    dtype: str | None

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        sizes = Sizes.of(config)
        keys, model_type = sizes.keys, sizes.model_type
        inner = keys.count(
            "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff", default=4 * sizes.hidden_size
        )
        return cls(
            model_type=model_type,
            num_layers=keys.count("num_decoder_layers", default=sizes.num_layers),
            hidden_size=sizes.hidden_size,
            intermediate_size=inner,
            num_heads=sizes.num_heads,
            num_kv_heads=_num_kv_heads(sizes),
            head_dim=_head_dim(sizes),
            vocab_size=sizes.vocab_size,
            max_positions=sizes.max_positions,
            is_tied=keys.flag("tie_word_embeddings", default=model_type in TIED),
            has_gate=model_type not in WITHOUT_GATE,
            experts=Experts.of(keys, inner),
            dtype=str(keys.get("torch_dtype", "dtype") or "") or None,
        )

    @property
    def is_native(self) -> bool:
        """Whether Legato computes it. Others run through transformers: in one shard, and without CUDA graphs."""
        return self.model_type in CATALOGUE

    def bytes_per_token(self, dtype: str, num_shards: int = 1) -> int:
        """Of the KV cache of one shard. Heads that cannot be split are kept by several."""
        heads = -(-self.num_kv_heads // num_shards)
        return 2 * self.num_layers * heads * self.head_dim * SIZES[dtype]

    def num_parameters(self) -> int:
        """For a shape that has no files to look at: matrices and norms. Biases and learned positions, which some
        have, are less than 1 % of any."""
        hidden = self.hidden_size
        attention = hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        matrices = 3 if self.has_gate else 2
        mlp = matrices * hidden * self.intermediate_size
        if self.experts is not None:
            mlp = self.experts.count * (matrices * hidden * self.experts.inner + hidden)
        embeddings = (1 if self.is_tied else 2) * self.vocab_size * hidden
        return self.num_layers * (attention + mlp + 2 * hidden) + embeddings + hidden

    def step_bytes(self, num_tokens: int, num_rows: int, dtype: str, num_shards: int) -> int:
        """The residual stream, one layer's projections, and the logits with what sampling makes of them."""
        heads = self.num_heads + 2 * self.num_kv_heads
        inner = self.intermediate_size
        if self.experts is not None:
            inner = max(inner, self.experts.chosen * self.experts.inner)
        wide = (heads * self.head_dim + (3 if self.has_gate else 2) * inner) // num_shards
        layer = num_tokens * (3 * self.hidden_size + wide) * SIZES[dtype]
        return layer + num_rows * self.vocab_size * (SIZES[dtype] + 4 * SAMPLING_COPIES)

    def graph_bytes(self, num_rows: int, dtype: str) -> int:
        if not self.is_native:
            return 0
        kept = kept_rows(num_rows)
        return sum(kept) * self.vocab_size * SIZES[dtype] + len(kept) * self.num_layers * LAYER_GRAPH_BYTES

    def reads(self, tensor: str) -> bool:
        """Whether the model loads the tensor of this name, if its files have it."""
        if self.is_tied and tensor in ("lm_head.weight", "output.weight"):
            return False
        return self.model_type not in GEMMA3 or not self.is_whole(tensor)

    def is_whole(self, tensor: str) -> bool:
        """Whether every shard has all of it: what sees is small, and not divided."""
        return tensor.removeprefix("model.").startswith(EYES)


def _num_kv_heads(sizes: Sizes) -> int:
    """Older families say in words what a number would say."""
    keys, model_type, num_heads = sizes.keys, sizes.model_type, sizes.num_heads
    if model_type == "deepseek_v2":  # every head has its own once it is out of the latent vector
        return num_heads
    if model_type in FALCONS and keys.flag("new_decoder_architecture", default=model_type == "RefinedWeb"):
        return keys.count("num_kv_heads", "n_head_kv", default=num_heads)
    if model_type in FALCONS | {"gpt_bigcode"}:
        return 1 if keys.flag("multi_query", default=True) else num_heads
    if model_type == "gpt2":
        return 1 if keys.get("attention_head_type") == "multiquery" else num_heads
    if model_type == "mpt":
        attention = keys.below("attn_config")
        kind = attention.text("attn_type", default="multihead_attention")
        return 1 if kind == "multiquery_attention" else attention.count("kv_n_heads", default=num_heads)
    return sizes.num_kv_heads


def _head_dim(sizes: Sizes) -> int:
    """Of a key in the cache, which has room for as much of a value."""
    if sizes.model_type == "deepseek_v2":
        keys = sizes.keys
        return keys.count("qk_nope_head_dim", default=128) + keys.count("qk_rope_head_dim", default=64)
    return sizes.head_dim
