"""Convolution and scan of Mamba: Triton against torch, and torch against a loop over tokens without blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from legato.kernels.recurrent import convolution
from legato.kernels.recurrent import selective_scan as kernels
from legato.kernels.recurrent.states import StateBlocks, StateSequences

STATE, WIDTH, SIZE = 5, 4, 4
# Tokens of each sequence in the step, and how many it has with them: decodes, the first chunk of a prompt, later ones
# that begin and end within a block, and padding.
COUNTS = (1, 1, 1, 9, 6, 4, 0, 2)
CONTEXTS = (1, 5, 8, 9, 11, 8, 0, 0)


def make_blocks(channels, device):
    generator = torch.Generator().manual_seed(channels)
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    most, num = -(-max(CONTEXTS) // SIZE), len(COUNTS)
    caches = [
        torch.randn(num * most + 1, -(-channels // 2), STATE + WIDTH - 1, generator=generator).to(device)
        for _ in range(2)
    ]
    tables = (torch.randperm(num * most, generator=generator).int() + 1).view(num, most)
    sequences = StateSequences(
        tables.to(device), torch.randperm(num, generator=generator).int().to(device),
        torch.tensor(CONTEXTS, dtype=torch.int32, device=device), (counts.cumsum(0).int() - counts).to(device),
        counts.to(device), SIZE,
    )  # fmt: skip
    return StateBlocks(*caches, sequences)


def inputs_of(channels, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    total = sum(COUNTS)

    def random(*size, kind=dtype):
        return torch.randn(*size, generator=generator).to(device, kind)

    wide = random(total, 2 * channels + 3)
    x, gate = wide[:, :channels], wide[:, channels : 2 * channels]
    exact = torch.float32
    scan = dict(
        dt=random(total, channels), a=-random(channels, STATE, kind=exact).exp(), b=random(total, STATE + 2)[:, 2:],
        c=random(total, STATE), d=random(channels, kind=exact), gate=gate,
    )  # fmt: skip
    return x, dict(weight=random(channels, WIDTH), bias=random(channels)), scan


def computed():
    """Tokens that are not padding."""
    return torch.tensor([context > 0 for count, context in zip(COUNTS, CONTEXTS, strict=True) for _ in range(count)])


@pytest.mark.parametrize("channels", [1, 63, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_computes_what_torch_does(device, channels, dtype):
    x, conv, scan = inputs_of(channels, device, dtype)
    ours, theirs = make_blocks(channels, device), make_blocks(channels, device)
    for bias in (conv["bias"], None):
        actual = convolution._convolution_triton(x, conv["weight"], bias, STATE, ours)
        expected = convolution._convolution_torch(x, conv["weight"], bias, STATE, theirs)
        torch.testing.assert_close(actual[computed()], expected[computed()], rtol=2e-2, atol=1e-5)
    actual = kernels._scan_triton(expected, **scan, blocks=ours)
    expected = kernels._scan_torch(expected, **scan, blocks=theirs)
    torch.testing.assert_close(actual[computed()], expected[computed()], rtol=2e-2, atol=1e-4)
    for name in ("lower", "upper"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-4, atol=1e-4)


def test_a_sequence_in_pieces_is_the_sequence_at_once(device):
    """And both are what the definition says, one token after the other."""
    channels, length = 6, 11
    x, conv, scan = inputs_of(channels, device)
    x, scan = x[:length], {name: value[:length] if len(value) == sum(COUNTS) else value for name, value in scan.items()}

    def run(pieces):
        blocks, first, outs = make_blocks(channels, device), 0, []
        for count in pieces:
            here = slice(first, first + count)
            first += count
            one = torch.tensor([[count], [first]], dtype=torch.int32, device=device)
            whole = blocks.sequences
            sequences = StateSequences(
                whole.block_tables, whole.rows[:1], one[1], torch.zeros_like(one[0]), one[0], SIZE
            )
            piece = StateBlocks(blocks.lower, blocks.upper, sequences)
            mixed = convolution.short_convolution(x[here], conv["weight"], conv["bias"], STATE, piece)
            cut = {name: value[here] if len(value) == length else value for name, value in scan.items()}
            outs.append(kernels.selective_scan(mixed, **cut, blocks=piece))
        return torch.cat(outs)

    at_once = run([length])
    for pieces in ([1] * length, [3, 5, 3], [4, 4, 3], [8, 1, 2]):
        torch.testing.assert_close(run(pieces), at_once, rtol=1e-5, atol=1e-5)

    padded = F.pad(x.T, (WIDTH - 1, 0))
    mixed = F.silu(F.conv1d(padded[None], conv["weight"][:, None], conv["bias"], groups=channels))[0].T
    state, expected = torch.zeros(channels, STATE, device=device), []
    for token in range(length):
        step = F.softplus(scan["dt"][token])[:, None]
        state = state * (step * scan["a"]).exp() + step * mixed[token][:, None] * scan["b"][token]
        expected.append(state @ scan["c"][token] + scan["d"] * mixed[token])
    torch.testing.assert_close(at_once, torch.stack(expected) * F.silu(scan["gate"]), rtol=1e-5, atol=1e-5)
