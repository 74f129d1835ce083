"""How the tokens of one row are chosen: the request's parameters, read once when it enters the row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from legato.pb.generate_pb2 import NextTokenChooserParameters


class Feature(Enum):
    """The parts of sampling that cost something; a batch without a row that uses one skips it."""

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


class Column(IntEnum):
    """The numbers that the device must know of a row, by their names in the message."""

    temperature = 0
    top_k = 1
    top_p = 2
    typical_p = 3
    min_p = 4
    repetition_penalty = 5
    frequency_penalty = 6
    presence_penalty = 7


_LARGEST_BIAS = 1e6
# By column: default, minimum, maximum. Beyond these, arithmetic in float32 has nothing to say: a lower temperature is
# the likeliest token, a higher one a uniform choice, a larger bias or penalty decides alone.
_BOUNDS: tuple[tuple[float, float, float], ...] = (
    (1.0, 1e-8, 1e8),
    (0.0, 0.0, 2.0**32),
    (1.0, 0.0, 1.0),
    (1.0, 0.0, 1.0),
    (0.0, 0.0, 1.0),
    (1.0, 1e-6, 1e6),
    (0.0, -_LARGEST_BIAS, _LARGEST_BIAS),
    (0.0, -_LARGEST_BIAS, _LARGEST_BIAS),
)


@dataclass(frozen=True, slots=True)
class RowParams:
    """What a row asks for, as nearly as arithmetic allows.

    The router refuses nonsense with a message. A shard may have other callers, and none of them may be able to hurt
    the other rows of a batch: numbers are moved within bounds, and NaN becomes the default.
    """

    numbers: tuple[float, ...] = tuple(default for default, _, _ in _BOUNDS)  # by column
    features: frozenset[Feature] = frozenset()
    seed: int = 0
    token_bias: tuple[tuple[int, float], ...] = ()
    top_n_tokens: int = 0
    # None of the end tokens is chosen before that many tokens were generated.
    min_new_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, message: NextTokenChooserParameters, top_n_tokens: int = 0) -> RowParams:
        """Proto3 cannot tell "absent" from 0, so 0 is the default of every number."""
        numbers = tuple(_within(getattr(message, column.name), *_BOUNDS[column]) for column in Column)
        bias = tuple(
            (token, _within(number, 0.0, -_LARGEST_BIAS, _LARGEST_BIAS)) for token, number in message.token_bias.items()
        )
        features = _features(message, numbers)
        if top_n_tokens:
            features |= {Feature.TOP_TOKENS}
        return cls(
            numbers,
            features,
            message.seed,
            bias,
            top_n_tokens,
            message.min_new_tokens,
            tuple(message.end_token_ids),
        )

    @property
    def top_k(self) -> int:
        return int(self.numbers[Column.top_k])


def _features(message: NextTokenChooserParameters, numbers: tuple[float, ...]) -> frozenset[Feature]:
    """What the row needs beyond taking the likeliest token."""
    uses = {
        Feature.WATERMARK: message.watermark,
        Feature.BIAS: bool(message.token_bias),
        Feature.REPETITION: numbers[Column.repetition_penalty] != 1.0,
        Feature.COUNTS: any(numbers[column] for column in (Column.frequency_penalty, Column.presence_penalty)),
        Feature.NO_END_YET: message.min_new_tokens > 0 and bool(message.end_token_ids),
    }
    if message.do_sample:
        uses |= {
            Feature.SAMPLE: True,
            Feature.TEMPERATURE: numbers[Column.temperature] != 1.0,
            Feature.TOP_K: numbers[Column.top_k] > 0,
            Feature.TOP_P: numbers[Column.top_p] < 1.0,
            Feature.TYPICAL_P: numbers[Column.typical_p] < 1.0,
            Feature.MIN_P: numbers[Column.min_p] > 0.0,
        }
    return frozenset(feature for feature, used in uses.items() if used)


def _within(value: float, default: float, low: float, high: float) -> float:
    return default if not value or math.isnan(value) else min(max(value, low), high)
