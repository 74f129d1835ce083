"""Mixture of experts: a router selects a few MLPs for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Required, TypedDict, Unpack

import torch
import torch.nn.functional as F

from legato.kernels.grouped_linear import group_rows
from legato.layers.mlp import Product, gate_by_name
from legato.layers.shard import Shard
from legato.quantization.experts import ExpertWeights

Logits = Callable[[torch.Tensor], torch.Tensor]  # [T, hidden] -> [T, num_experts]


class RoutingOptions(TypedDict, total=False):
    normalise: Required[bool]
    factor: float
    num_groups: int
    num_chosen_groups: int


class ExpertRouter:
    """Selects the top-k experts of each token and their weights.

    `normalise` makes the weights of a token's experts sum to one; `factor` multiplies them. With `num_groups` the
    experts stand in so many groups, and only those of the `num_chosen_groups` with the best expert can be chosen.
    """

    def __init__(
        self,
        logits: Logits,
        num_chosen: int,
        *,
        normalise: bool,
        factor: float = 1.0,
        num_groups: int = 1,
        num_chosen_groups: int = 1,
    ) -> None:
        self.logits = logits
        self.num_chosen = num_chosen
        self.normalise = normalise
        self.factor = factor
        self.num_groups = num_groups
        self.num_chosen_groups = num_chosen_groups

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> weights [T, num_chosen] float32 and experts [T, num_chosen] int64."""
        scores = self.logits(x).softmax(-1, dtype=torch.float32)
        if self.num_chosen_groups < self.num_groups:
            scores = self._within_groups(scores)
        weights, ids = scores.topk(self.num_chosen, sorted=False)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights if self.factor == 1.0 else weights * self.factor), ids

    def _within_groups(self, scores: torch.Tensor) -> torch.Tensor:
        grouped = scores.unflatten(1, (self.num_groups, -1))
        chosen = grouped.amax(-1).topk(self.num_chosen_groups).indices
        others = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, chosen, False)
        return grouped.masked_fill(others[:, :, None], 0.0).flatten(1)


class SigmoidRouter(ExpertRouter):
    """DeepSeek V3's: scores are independent of each other, and a correction of them counts for the choice alone.

    Of its groups those with the best sum of two experts can be chosen from.
    """

    def __init__(
        self, logits: Logits, num_chosen: int, correction: torch.Tensor, **how: Unpack[RoutingOptions]
    ) -> None:
        super().__init__(logits, num_chosen, **how)
        self.correction = correction  # [num_experts] float32

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.logits(x).sigmoid()
        choice = scores + self.correction
        if self.num_chosen_groups < self.num_groups:
            grouped = choice.unflatten(1, (self.num_groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.num_chosen_groups).indices
            others = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
            choice = grouped.masked_fill(others[:, :, None], float("-inf")).flatten(1)
        ids = choice.topk(self.num_chosen, sorted=False).indices
        weights = scores.gather(1, ids)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.factor, ids


class SparseMixer(ExpertRouter):
    """PhiMoE's: the two best experts, each with its share among those whose scores are close to it."""

    def __init__(self, logits: Logits, width: float) -> None:
        super().__init__(logits, 2, normalise=False)
        self.width = width  # how far below the best a score may be, as a part of it

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.logits(x).float()
        first, first_id = self._best(scores, scores)
        second, second_id = self._best(scores, scores.scatter(-1, first_id, float("-inf")))
        return torch.cat((first, second), dim=-1), torch.cat((first_id, second_id), dim=-1)

    def _best(self, scores: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of those that are `left`: the best one [T, 1], and its weight."""
        top, ids = left.max(-1, keepdim=True)
        is_far = (top - scores) / scores.abs().clamp(min=top) > self.width
        return left.masked_fill(is_far, float("-inf")).softmax(-1).gather(-1, ids), ids


class Experts:
    """Gated MLPs of which this shard has a part of the inner dimension of each: the sum over the shards is the
    caller's."""

    def __init__(self, router: ExpertRouter, gate_up: ExpertWeights, down: ExpertWeights, activation: str) -> None:
        self.router = router
        self.gate_up = gate_up  # [2 inner, hidden] of each, gate and then up
        self.down = down  # [hidden, inner] of each
        self.gate = gate_by_name(activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x)
        groups = group_rows(ids, self.gate_up.num_experts)
        inner = self.gate_up.apply(x, groups)
        if self.gate_up.lora is not None:
            inner = self.gate_up.lora.add_experts(inner, x, ids)
        inner = self.gate(inner)
        outputs = self.down.apply(inner, groups, weights.flatten())  # [T num_chosen, hidden]
        if self.down.lora is not None:
            outputs = self.down.lora.add_experts(outputs, inner, ids, weights.flatten())
        return outputs.view(*ids.shape, -1).sum(1)


class ExpertMLP:
    """Routed experts, and optionally a shared expert for every token, with or without a gate of its own.

    Their projections leave the sum over the shards to this layer, which adds them first: one sum.
    """

    def __init__(
        self, experts: Experts, shard: Shard, shared: Product | None = None, shared_gate: Product | None = None
    ) -> None:
        self.experts = experts
        self.shard = shard
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.experts(x)
        if self.shared is not None:
            common = self.shared(x)
            if self.shared_gate is not None:
                common = common * F.sigmoid(self.shared_gate(x))
            out = out.add_(common)
        return self.shard.all_reduce(out)
