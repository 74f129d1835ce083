"""The model configuration that the server needs: sizes, positions and attention windows from config.json.

Only what every causal model has is a field. What one architecture has, its own file reads from `keys`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from legato.common.errors import UnsupportedModel
from legato.layers.rotary import RopeConfig
from legato.models.sizes import Sizes


@dataclass(frozen=True, slots=True)
class ModelConfig(Sizes):
    """An architecture whose config.json means something else sets `model.config = replace(config, ...)`."""

    rope_option: tuple[str, float] | None = None  # what --rope-scaling and --rope-factor say
    decoder_start_token_id: int | None = None  # of encoder-decoder models: the first token of the decoder
    ropes: list[RopeConfig] = field(default_factory=list, compare=False)  # what `rope` was asked for: none without rope

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        sizes = Sizes.of(config)
        return cls(**{each.name: getattr(sizes, each.name) for each in fields(sizes)})

    @property
    def is_tied(self) -> bool:
        """The head is the embedding. Each architecture has its own default, which transformers no longer writes."""
        return self.keys.flag("tie_word_embeddings")

    def windows(self, window: int, slides: Callable[[int], bool]) -> tuple[int, ...]:
        """For each layer how many keys its queries see, 0 for all. `layer_types` says which layers have the `window`,
        or else `slides` does, the architecture's own rule."""
        kinds = {"full_attention": 0, "sliding_attention": window}
        types = self.keys.texts("layer_types", length=self.num_layers)
        if types is None:
            return tuple(window if slides(layer) else 0 for layer in range(self.num_layers))
        if unknown := set(types) - set(kinds):
            raise UnsupportedModel(
                f"config.json: layer type '{min(unknown)}' is not supported; known: {', '.join(kinds)}"
            )
        return tuple(kinds[kind] for kind in types)

    def with_rope_option(self, kind: str, factor: float) -> ModelConfig:
        """Replace what the checkpoint says, and stretch the longest sequence."""
        return replace(self, rope_option=(kind, factor), max_positions=int(self.max_positions * factor))

    def rope(
        self,
        *,
        dim: int | None = None,
        layer_type: str | None = None,
        default_theta: float = 10_000.0,
        default_share: float = 1.0,
    ) -> RopeConfig:
        """Rotation of a head's first `dim` dimensions; without `dim` of the share that config.json says, or else
        `default_share`.

        transformers 5 writes everything about rope into `rope_parameters`, with an object for each `layer_type` where
        layers differ. Before, there were separate keys; an architecture whose layers differ reads those itself.
        """
        keys = self.keys
        parameters = keys.below("rope_parameters")
        if layer_type is not None and layer_type in parameters.raw:
            parameters = parameters.below(layer_type)
        scaling = {**keys.below("rope_scaling").raw, **parameters.raw}
        if self.rope_option is not None:
            scaling = {**scaling, "rope_type": self.rope_option[0], "factor": self.rope_option[1]}
        if "original_max_position_embeddings" in keys.raw:
            scaling.setdefault("original_max_position_embeddings", keys.raw["original_max_position_embeddings"])
        own = keys.number("rope_theta", "rotary_emb_base", default=default_theta)
        share = keys.number("partial_rotary_factor", "rotary_pct", default=default_share)
        share = parameters.number("partial_rotary_factor", default=share)
        rope = RopeConfig(
            dim=dim or int(self.head_dim * share),
            theta=parameters.number("rope_theta", default=own),
            trained_positions=keys.count("max_position_embeddings", "n_positions", default=self.max_positions),
            scaling=scaling,
        )
        self.ropes.append(rope)
        return rope
