"""Plain and gated MLPs, and the activations by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from legato.common.errors import UnsupportedModel
from legato.kernels.activation import Activation, gate_and_mul
from legato.kernels.quantized.linear import Gate
from legato.layers.linear import Linear
from legato.quantization.dense import DenseWeight
from legato.quantization.weight import QuantizedWeight, row_type_of_weight


class Product(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu_squared,
    "silu": F.silu,
    "swish": F.silu,
    "quick_gelu": _quick_gelu,
}
# Activations that a kernel fuses with the gate.
GATES: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def activation_by_name(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"the activation '{name}' is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gate_by_name(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """[T, 2 inner], gate and up side by side -> activation(gate) * up."""
    if name in GATES:
        kind = GATES[name]
        return lambda gate_up: gate_and_mul(gate_up, kind)
    activation = activation_by_name(name)

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


class MLP:
    """down(activation(up(x)))"""

    def __init__(self, up: Product, down: Product, activation: str) -> None:
        self.up = up
        self.down = down
        self.activation = activation_by_name(activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class GatedMLP:
    """down(activation(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, gate_up: Product, down: Product, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.gate = gate_by_name(activation)

        self.kind = GATES.get(activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._gated(x))

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is not None and isinstance(self.gate_up, Linear):
            weight, lora = self.gate_up.weight, self.gate_up.lora
            is_adapted = lora is not None and lora.is_active  # adapters add to the product, before the gate
            if isinstance(weight, DenseWeight) and not is_adapted:
                return weight.apply_gated(x, self.kind)
            if isinstance(weight, QuantizedWeight) and not is_adapted:
                row_type = row_type_of_weight(getattr(self.down, "weight", None))
                return weight.apply_gated(x, Gate(self.kind, row_type))
        return self.gate(self.gate_up(x))
