"""What a request asks of the sampler, with the defaults that a missing field stands for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from legato.pb.generate_pb2 import NextTokenChooserParameters
from legato.sampling.sampler import Sampler


@dataclass(frozen=True)
class Asked:
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
    min_new_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    top_n_tokens: int = 0

    @property
    def message(self) -> NextTokenChooserParameters:
        names = [each.name for each in fields(self) if each.name != "top_n_tokens"]
        return NextTokenChooserParameters(**{name: getattr(self, name) for name in names})

    def enter(self, sampler: Sampler, row: int, prompt_ids: list[int], generated_ids: list[int]) -> None:
        sampler.set_row(row, self.message, prompt_ids, generated_ids, self.top_n_tokens)
