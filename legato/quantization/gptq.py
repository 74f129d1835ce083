"""GPTQ: quantize a matrix column by column; what rounding changes in a column, the columns behind it make up for.

How columns make up for each other follows from the Hessian of the layer's squared error, H = 2 XᵀX over calibration
activations X (Frantar et al., 2022). Two things are added to that:

- X is what the quantized layers before leave, D what the dense model has there. Wanted is W Dᵀ, so before it is
  quantized W moves to where W Xᵀ is nearest to that: W + W (D - X)ᵀX (XᵀX)⁻¹ (as in GPTAQ, Li et al., 2025).
- Behind the pass over the columns, scales are fitted to the codes and codes to the scales in turns (`refined`).

Codes, scales and zeros become tensors in the layout that `readers/gptq.py` reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from legato.quantization.calibration_products import add_inner
from legato.quantization.packing import WORD, word_unit

# Columns that are quantized before the rest of the matrix is updated: the result is the same, in fewer passes.
BLOCK = 128
# Shrunken ranges that are tried for each group: of both ends, each by itself, and of symmetric ones.
SHRINK = (1.0, 0.92, 0.84, 0.76, 0.68)
SHRINK_SYMMETRIC = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 0.64, 0.6)
LEAST_SCALE = 1e-30
# Turns of fitting scales and codes.
TURNS = 2
# A fitted scale is at most this share away from the one before.
MOST_CHANGE = 0.5
# How inputs go together is known the worse the fewer tokens there were for each: by so much of that ratio the numbers
# beside the Hessian's diagonal become smaller, by a half at most.
UNCERTAINTY, MOST_UNCERTAIN = 0.25, 0.5
# How damping grows until the Hessian can be inverted.
LEAST_DAMPING, MORE_DAMPING = 1e-4, 10.0


@dataclass(frozen=True, slots=True)
class GptqOptions:
    bits: int = 4
    group_size: int = 128  # -1: one group
    act_order: bool = False  # groups are of inputs with activations of the same size, not of neighbours
    sym: bool = False  # ranges around zero
    damping: float = 0.03  # share of the mean of the Hessian's diagonal that is added to it

    @property
    def largest(self) -> int:
        return (1 << self.bits) - 1


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """Codes [out, in], scales fp16 and zeros [out, groups], and the group of each input."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    index: torch.Tensor
    options: GptqOptions

    def dense(self) -> torch.Tensor:
        zero, scale = (tensor[:, self.index].float() for tensor in (self.zero, self.scale))
        return (self.codes.float() - zero) * scale

    def tensors(self) -> dict[str, torch.Tensor]:
        """In the layout of version 1: zeros minus one."""
        bits = self.options.bits
        zeros = (self.zero.long() - 1) & self.options.largest
        return {
            "qweight": pack_words(self.codes.t(), bits, 0),
            "qzeros": pack_words(zeros.t(), bits, 1),
            "scales": self.scale.t().contiguous(),
            "g_idx": self.index.int(),
        }


class Hessian:
    """Of the inputs of one product, accumulated over calibration batches."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.sum = torch.zeros(size, size, dtype=torch.float32, device=device)
        self.shift: torch.Tensor | None = None  # (D - X)ᵀX
        self.num_tokens = 0

    def add(self, x: torch.Tensor, dense: torch.Tensor | None = None) -> None:
        """x [T, in], and the same inputs in the dense model."""
        x = x.float()
        add_inner(self.sum, x, x)
        self.num_tokens += x.shape[0]
        if dense is not None:
            if self.shift is None:
                self.shift = torch.zeros_like(self.sum)
            add_inner(self.shift, dense.float() - x, x)

    @property
    def value(self) -> torch.Tensor:
        """The identity where no token came: then GPTQ is rounding to nearest."""
        size = len(self.sum)
        if self.num_tokens == 0:
            return torch.eye(size, device=self.sum.device)
        uncertain = min(UNCERTAINTY * size / self.num_tokens, MOST_UNCERTAIN)
        found = self.sum * ((1 - uncertain) * 2 / self.num_tokens)
        found.diagonal().div_(1 - uncertain)
        return found

    def moved(self, matrix: torch.Tensor, damping: float) -> torch.Tensor:
        """[out, in] where its products with the inputs are nearest to the dense ones."""
        if self.shift is None:
            return matrix.float()
        factor = _factor(self.value, damping)
        shift = matrix.float() @ (self.shift * (2 / self.num_tokens))
        return matrix.float() + torch.cholesky_solve(shift.t(), factor).t()


def quantize(matrix: torch.Tensor, hessian: torch.Tensor, options: GptqOptions) -> GptqMatrix:
    """[out, in] with the Hessian [in, in] of its inputs."""
    weight, hessian = matrix.float().clone(), hessian.clone()
    num_inputs = weight.shape[1]
    size = options.group_size if options.group_size > 0 else num_inputs
    unseen = hessian.diagonal() == 0
    hessian.diagonal()[unseen] = 1
    weight[:, unseen] = 0
    # Inputs with large activations come first, while there are many columns left to make up for them.
    order = hessian.diagonal().argsort(descending=True, stable=True)
    inverse = _inverse(hessian[order][:, order], options.damping)
    place = torch.empty_like(order)
    place[order] = torch.arange(num_inputs, device=weight.device)
    if options.act_order:
        index, ranges = place // size, None
    else:
        index = torch.arange(num_inputs, device=weight.device) // size
        ranges = _ranges_of(weight, inverse.diagonal()[place], size, options)
    codes, scale, zero = _columns(weight[:, order], inverse, size, options, index[order], ranges)
    hessian.diagonal().add_(options.damping * hessian.diagonal().mean())
    return refined(GptqMatrix(codes[:, place], scale, zero, index, options), weight, hessian)


def refined(found: GptqMatrix, weight: torch.Tensor, hessian: torch.Tensor) -> GptqMatrix:
    """With a smaller squared error: scales are fitted to the codes, and codes to the scales."""
    for _ in range(TURNS):
        found = replace(found, scale=_fitted_scales(found, weight, hessian))
        found = replace(found, codes=_fitted_codes(found, weight, hessian))
    return found


def _fitted_scales(found: GptqMatrix, weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Least squares, row by row, where the result is near the scale that was there."""
    num_groups = found.scale.shape[1]
    centred = found.codes.float() - found.zero[:, found.index].float()
    members = torch.nn.functional.one_hot(found.index, num_groups).float()  # [in, groups]
    normal = torch.empty(len(weight), num_groups, num_groups, device=weight.device)
    for group in range(num_groups):
        mine = (found.index == group).nonzero()[:, 0]
        normal[:, group] = ((centred[:, mine] @ hessian[mine]) * centred) @ members
    target = ((weight @ hessian) * centred) @ members
    # Groups in which every code is zero have a scale that does not matter.
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal.add_(1e-6 * diagonal.mean(1, keepdim=True) + 1e-12)
    fitted, before = torch.linalg.solve(normal, target), found.scale.float()
    is_near = (fitted - before).abs() <= MOST_CHANGE * before
    return torch.where(is_near, fitted, before).to(torch.float16)


def _fitted_codes(found: GptqMatrix, weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Column by column the codes that are best beside all others as they are."""
    codes = found.codes.float()
    scale, zero = (tensor[:, found.index].float() for tensor in (found.scale, found.zero))
    slope = ((codes - zero) * scale - weight) @ hessian  # of the error, by column
    order = hessian.diagonal().argsort(descending=True, stable=True)
    for columns in order.split(BLOCK):
        near, within = slope[:, columns], hessian[columns][:, columns]
        changes = torch.zeros_like(near)
        for place, column in enumerate(columns.tolist()):
            old, step = codes[:, column], scale[:, column]
            new = (old - near[:, place] / (within[place, place] * step)).round_().clamp_(0, found.options.largest)
            changes[:, place] = (new - old) * step
            codes[:, column] = new
            near.addr_(changes[:, place], within[place])
        slope.addmm_(changes, hessian[columns])
    return codes.to(torch.uint8)


Ranges = tuple[torch.Tensor, torch.Tensor]  # scales and zeros


def _columns(
    weight: torch.Tensor,
    inverse: torch.Tensor,
    size: int,
    options: GptqOptions,
    index: torch.Tensor,
    ranges: Ranges | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and zeros of columns in order; overwrites `weight`. `index` are the groups of the columns; without
    `ranges` groups are in order, too, and get their range when it is their turn."""
    num_outputs, num_inputs = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    found: list[Ranges] = []
    for first in range(0, num_inputs, BLOCK):
        last = min(first + BLOCK, num_inputs)
        errors = torch.empty(num_outputs, last - first, device=weight.device)
        for column in range(first, last):
            if ranges is not None:
                scale, zero = (each[:, index[column]] for each in ranges)
            else:
                if column % size == 0:
                    group = _updated(weight, errors, inverse, first, column, size)
                    found.append(_range_of(group, inverse.diagonal()[column : column + size], options))
                scale, zero = found[-1]
            numbers, wide = weight[:, column], scale.float()
            code = (numbers / wide).round_().add_(zero).clamp_(0, options.largest)
            codes[:, column] = code.to(torch.uint8)
            error = (numbers - (code - zero) * wide) / inverse[column, column]
            errors[:, column - first] = error
            weight[:, column:last].addr_(error, inverse[column, column:last], alpha=-1)
        weight[:, last:].addmm_(errors, inverse[first:last, last:], alpha=-1)
    scales, zeros = ranges or (torch.stack([each[part] for each in found], 1) for part in range(2))
    return codes, scales, zeros.to(torch.uint8)


def _ranges_of(weight: torch.Tensor, importance: torch.Tensor, size: int, options: GptqOptions) -> Ranges:
    """Of groups of neighbours."""
    pairs = [
        _range_of(group, some, options)
        for group, some in zip(weight.split(size, 1), importance.split(size), strict=True)
    ]
    scales, zeros = (torch.stack([pair[part] for pair in pairs], 1) for part in range(2))
    return scales, zeros


def _updated(
    weight: torch.Tensor, errors: torch.Tensor, inverse: torch.Tensor, first: int, column: int, size: int
) -> torch.Tensor:
    """The columns of a group as they are once all columns before it have been made up for."""
    last = min(first + BLOCK, weight.shape[1])
    group = weight[:, column : column + size].clone()
    behind = group[:, last - column :]
    if behind.shape[1] and column > first:
        done = column - first
        behind.addmm_(errors[:, :done], inverse[first:column, last : column + size], alpha=-1)
    return group


def _range_of(group: torch.Tensor, inverse: torch.Tensor, options: GptqOptions) -> Ranges:
    """Scale [out] in fp16 and zero [out]: the range of `SHRINK` with the least squared error, in which a column counts
    as much as its rounding will: the less, the larger its number on the diagonal of the `inverse`."""
    low, high = group.amin(1).clamp(max=0), group.amax(1).clamp(min=0)
    pairs = [(below, above) for below in SHRINK for above in SHRINK]
    if options.sym:
        high = torch.maximum(high, -low)
        low = -high
        pairs = [(share, share) for share in SHRINK_SYMMETRIC]
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for below, above in pairs:
        scale = (high * above - low * below) / options.largest
        zero = (-low * below / scale.clamp(min=LEAST_SCALE)).round_()
        # A zero is not 0: version 1 stores zeros minus one, and other readers add one to whole words, with carries.
        scale = torch.where(zero < 1, high * above / (options.largest - 1), scale).to(torch.float16)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        wide = scale.float()[:, None]
        zero = torch.full_like(low, (options.largest + 1) // 2) if options.sym else zero.clamp_(1, options.largest)
        code = (group / wide).round_().add_(zero[:, None]).clamp_(0, options.largest)
        error = (((code - zero[:, None]) * wide - group) / inverse).square_().sum(1)
        if best is None:
            best = error, scale, zero
            continue
        better = error < best[0]
        best = (
            torch.where(better, error, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, zero, best[2]),
        )
    assert best is not None
    return best[1], best[2]


def _inverse(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse."""
    while True:
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(_factor(hessian, damping)), upper=True)
        if not failed:
            return upper
        damping = max(damping, LEAST_DAMPING) * MORE_DAMPING


def _factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The lower Cholesky factor, with more damping where it takes more."""
    mean = hessian.diagonal().mean()
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return factor
        damping = max(damping, LEAST_DAMPING) * MORE_DAMPING


def pack_words(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Small integers -> int32 [.., count·bits/32, ..], a little-endian bit stream along `dim`."""
    values = values.movedim(dim, -1).long()
    count, words = word_unit(bits)
    units = values.unflatten(-1, (-1, count))
    out = torch.zeros(*units.shape[:-1], words, dtype=torch.long, device=values.device)
    for place in range(count):
        word, shift = divmod(place * bits, WORD)
        out[..., word] |= units[..., place] << shift
        if shift + bits > WORD:
            out[..., word + 1] |= units[..., place] >> (WORD - shift)
    # 64-bit words keep their low half when they become 32-bit ones.
    return out.flatten(-2).movedim(-1, dim).to(torch.int32).contiguous()
