"""How the tokens of one row are chosen, as the shard sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from legato.pb import generate_pb2


class Feature(Enum):
    """The parts of sampling that cost something, and that a batch in which nobody uses them skips."""

    WATERMARK = auto()
    BIAS = auto()
    REPETITION = auto()
    COUNTS = auto()  # frequency and presence penalties: both look at how often a token was generated
    NO_END_YET = auto()  # until `min_new_tokens` are there
    SAMPLE = auto()  # without it a row takes the likeliest token, and the rest below means nothing to it
    TEMPERATURE = auto()
    TOP_K = auto()
    TOP_P = auto()
    TYPICAL_P = auto()
    MIN_P = auto()
    TOP_TOKENS = auto()


# Beyond these, arithmetic in float32 has nothing to say: a lower temperature is the likeliest token, a higher one a
# uniform choice, a larger bias or penalty decides alone.
_TEMPERATURES = (1e-8, 1e8)
_PENALTIES = (1e-6, 1e6)
_LARGEST_BIAS = 1e6


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
    # None of the end tokens is chosen before that many tokens were generated.
    min_new_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()

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
            min_new_tokens=pb.min_new_tokens,
            end_token_ids=tuple(pb.end_token_ids),
        )

    def bounded(self) -> SamplingParams:
        """The nearest parameters that cannot overflow; NaN becomes the default.

        The router refuses nonsense with a message. A shard may have other callers, and none of them may be able to
        hurt the other rows of a batch.
        """
        bias = _LARGEST_BIAS
        return replace(
            self,
            temperature=_within(self.temperature, *_TEMPERATURES, default=1.0),
            top_p=_within(self.top_p, 0.0, 1.0, default=1.0),
            typical_p=_within(self.typical_p, 0.0, 1.0, default=1.0),
            min_p=_within(self.min_p, 0.0, 1.0, default=0.0),
            repetition_penalty=_within(self.repetition_penalty, *_PENALTIES, default=1.0),
            frequency_penalty=_within(self.frequency_penalty, -bias, bias, default=0.0),
            presence_penalty=_within(self.presence_penalty, -bias, bias, default=0.0),
            token_bias={id: _within(each, -bias, bias, default=0.0) for id, each in self.token_bias.items()},
        )

    def features(self) -> frozenset[Feature]:
        """What this row needs beyond taking the likeliest token."""
        uses = {
            Feature.WATERMARK: self.watermark,
            Feature.BIAS: bool(self.token_bias),
            Feature.REPETITION: self.repetition_penalty != 1.0,
            Feature.COUNTS: self.frequency_penalty != 0.0 or self.presence_penalty != 0.0,
            Feature.NO_END_YET: self.min_new_tokens > 0 and bool(self.end_token_ids),
            Feature.TOP_TOKENS: self.top_n_tokens > 0,
        }
        if self.do_sample:
            uses |= {
                Feature.SAMPLE: True,
                Feature.TEMPERATURE: self.temperature != 1.0,
                Feature.TOP_K: self.top_k > 0,
                Feature.TOP_P: self.top_p < 1.0,
                Feature.TYPICAL_P: self.typical_p < 1.0,
                Feature.MIN_P: self.min_p > 0.0,
            }
        return frozenset(feature for feature, used in uses.items() if used)


def _within(value: float, low: float, high: float, *, default: float) -> float:
    return default if math.isnan(value) else min(max(value, low), high)
