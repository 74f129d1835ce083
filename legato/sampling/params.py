"""How the tokens of one row are chosen, as the shard sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from legato.pb import generate_pb2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Defaults are the identity, so that a row that sets nothing costs nothing."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    watermark: bool = False
    seed: int = 0
    token_bias: dict[int, float] = field(default_factory=dict)
    top_n_tokens: int = 0

    @classmethod
    def from_pb(cls, pb: generate_pb2.NextTokenChooserParameters, top_n_tokens: int = 0) -> SamplingParams:
        """Proto3 cannot tell "absent" from 0, so 0 means "off" wherever 0 itself would make no sense."""
        return cls(
            do_sample=pb.do_sample,
            temperature=pb.temperature or 1.0,
            top_k=pb.top_k,
            top_p=pb.top_p or 1.0,
            typical_p=pb.typical_p or 1.0,
            min_p=pb.min_p,
            repetition_penalty=pb.repetition_penalty or 1.0,
            frequency_penalty=pb.frequency_penalty,
            presence_penalty=pb.presence_penalty,
            watermark=pb.watermark,
            seed=pb.seed,
            token_bias=dict(pb.token_bias),
            top_n_tokens=top_n_tokens,
        )
