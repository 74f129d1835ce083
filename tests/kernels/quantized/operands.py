"""Random quantized matrices of every form, whose products with normal x are about 1."""

from __future__ import annotations

import torch

from legato.kernels.quantized.operand import Form, Operand
from legato.quantization.packing import pack_codes
from legato.quantization.schemes import NF4

# The mean size of a number.
SIZES: dict[Form, float] = {"int4": 5, "table": 0.5, "codes": 74, "int8": 74, "fp8": 60}


def random_operand(
    form: Form,
    out_features: int,
    in_features: int,
    group_size: int,
    zero: bool | str = False,
    device: str = "cpu",
) -> Operand:
    """`zero` "minimum": codes have minima, and scales are float16, as GGUF has them."""
    generator = torch.Generator().manual_seed(out_features + in_features)

    def integers(low: int, high: int, width: int) -> torch.Tensor:
        return torch.randint(low, high, (out_features, width), generator=generator)

    num_groups = -(-in_features // group_size)
    if form in ("int4", "table"):
        numbers = pack_codes(integers(0, 16, in_features).to(torch.uint8), 4)
    elif form == "codes":
        numbers = integers(0, 256, in_features).to(torch.uint8)
    elif form == "int8":
        numbers = integers(-127, 128, in_features).to(torch.int8)
    else:
        numbers = (torch.randn(out_features, in_features, generator=generator) * 60).to(torch.float8_e4m3fn)
    scale = (torch.rand(out_features, num_groups, generator=generator) + 0.5) / SIZES[form] / in_features**0.5
    zeros = integers(0, 16 if form == "int4" else 256, num_groups).to(torch.uint8) if zero else None
    if zeros is not None and zero == "minimum":
        scale = scale.half()
        zeros = (zeros.float() * -scale.float() - 0.3 * scale.float()).half()
    return Operand(
        form,
        numbers.to(device),
        scale.to(device),
        in_features,
        group_size,
        None if zeros is None else zeros.to(device),
        NF4 if form == "table" else None,
    )
