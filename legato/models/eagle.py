"""EAGLE-3 heads: one Llama layer that proposes tokens from the hidden states of three layers of its base model.

    fused      fc(states of three layers, side by side)                                 of every token, by its slot
    layer      attention over cat(norm(embedding of the next token), norm(state)); residual stream, MLP as in Llama
    logits     lm_head(norm(state)), of a vocabulary of its own: token i is the base model's i + d2t[i]

At position p it reads the state of token p and the embedding of token p + 1, and guesses token p + 2. Behind what the
base model has computed it goes on with the states that it makes itself, before the last norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.layers.attention import SelfAttention
from legato.layers.kv_cache import KVCache, KVShape
from legato.layers.mlp import activation_by_name
from legato.layers.norm import RMSNorm
from legato.layers.rotary import Rotary
from legato.layers.shard import Heads
from legato.layers.step import Step
from legato.modelfiles.speculator import SpeculatorFiles
from legato.models.config import ModelConfig
from legato.models.decoder import Decoder
from legato.models.registry import CausalModel
from legato.models.speculators import CheckpointTensors

# Layers of the base model, whose inputs are what is read.
NUM_TAPPED = 3


class Eagle3Head:
    def __init__(self, files: SpeculatorFiles, base: Decoder, tensors: CheckpointTensors, device: torch.device) -> None:
        self.config = config = ModelConfig.from_hf(files.layer_config)
        self.vocab_size, self.device = base.config.vocab_size, device
        size, tapped_size = config.hidden_size, base.config.hidden_size
        self.tapped = files.tapped_layers(base.config.num_layers)
        if config.num_layers != 1:
            raise UnsupportedModel(f"{files.path}: an EAGLE-3 head with {config.num_layers} layers is not supported")
        layer = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
        num_kv_heads = config.num_kv_heads
        width, kv_width = config.num_heads * config.head_dim, num_kv_heads * config.head_dim
        heads = Heads(
            config.num_heads, num_kv_heads, config.head_dim, config.head_dim, 0, config.num_heads, 0, num_kv_heads
        )
        eps = config.keys.number("rms_norm_eps", default=1e-6)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(tensors(f"{name}.weight", size), eps)

        attention, inner = f"{layer}.self_attn", config.keys.count("intermediate_size")
        widths = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self._qkv = torch.cat([tensors(f"{attention}.{name}.weight", n, 2 * size) for name, n in widths.items()])
        self._output = tensors(f"{attention}.o_proj.weight", size, width)
        self._gate, self._up = (tensors(f"{layer}.mlp.{name}_proj.weight", inner, size) for name in ("gate", "up"))
        self._down = tensors(f"{layer}.mlp.down_proj.weight", size, inner)
        self._token_norm, self._state_norm = norm(f"{layer}.input_layernorm"), norm(f"{layer}.hidden_norm")
        self._mlp_norm, self._norm = norm(f"{layer}.post_attention_layernorm"), norm("norm")
        self._fc = tensors("fc.weight", size, NUM_TAPPED * tapped_size)
        self._adds_normed = bool(files.config.get("norm_before_residual", False))
        self._activation = activation_by_name(config.keys.text("hidden_act", default="silu"))
        draft_vocab = files.number("draft_vocab_size", self.vocab_size)
        self._lm_head = tensors("lm_head.weight", draft_vocab, size)
        self._targets = torch.arange(draft_vocab, device=device)
        if "d2t" in tensors:
            self._targets = self._targets + tensors.integers("d2t", draft_vocab)
        if not bool(((self._targets >= 0) & (self._targets < self.vocab_size)).all()):
            raise ModelFileError(f"{files.path}: d2t leads to tokens beyond the {self.vocab_size} of the base model")
        tensors.skip("t2d")  # the same the other way round
        if "embed_tokens.weight" in tensors:
            weight = tensors("embed_tokens.weight", self.vocab_size, size)
            self._embed = lambda ids: F.embedding(ids, weight)
        elif size != tapped_size:
            raise ModelFileError(f"{files.path}: embed_tokens.weight is missing, and the base model's are wider")
        else:
            self._embed = base.embedding
        dtype = self._fc.dtype
        self._rotary = Rotary(config.rope(), config.max_positions, dtype, device)
        self._attention = SelfAttention(heads, self._rotary)
        self.kv_shape = KVShape(1, num_kv_heads, config.head_dim, dtype)

    def limit(self, longest: int) -> None:
        self._rotary.limit(longest)

    @property
    def state_shape(self) -> tuple[int, torch.dtype]:
        """Of the fused states."""
        return self._fc.shape[0], self._fc.dtype

    def fuse(self, states: list[torch.Tensor]) -> torch.Tensor:
        """Of the tapped layers, [T, hidden_size] each -> [T, size]."""
        return F.linear(torch.cat(states, 1).to(self._fc.dtype), self._fc)

    def forward(self, step: Step, states: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """`step.input_ids` are the tokens behind those whose states [T, size] these are. States of wanted tokens."""
        normed = self._state_norm(states)
        residual = normed if self._adds_normed else states
        x = torch.cat((self._token_norm(self._embed(step.input_ids).to(states.dtype)), normed), 1)
        attended = self._attention(F.linear(x, self._qkv), cache.layers[0], step)
        x = step.wanted(residual) + F.linear(step.wanted(attended), self._output)
        normed = self._mlp_norm(x)
        inner = self._activation(F.linear(normed, self._gate)) * F.linear(normed, self._up)
        return x + F.linear(inner, self._down)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Of all tokens of the base model; those that the head does not know are out of the question."""
        known = F.linear(self._norm(states), self._lm_head).float()
        scores = known.new_full((len(known), self.vocab_size), torch.finfo(known.dtype).min)
        scores[:, self._targets] = known
        return scores


def load_eagle3(files: SpeculatorFiles, base: CausalModel, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    if not isinstance(base, Decoder) or type(base).forward is not Decoder.forward:
        raise UnsupportedModel(f"{files.path}: EAGLE-3 for model_type '{base.config.model_type}' is not supported")
    tensors = CheckpointTensors(files, dtype, device)
    head = Eagle3Head(files, base, tensors, device)
    tensors.check_all_used()
    return head
