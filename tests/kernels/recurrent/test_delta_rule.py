"""The gated delta rule: Triton against torch, and torch against a loop over tokens without blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from legato.kernels.recurrent import convolution
from legato.kernels.recurrent import delta_rule as kernels
from legato.kernels.recurrent.states import StateBlocks, StateSequences

SIZE = 80
# Tokens of each sequence in the step, and how many it has with them: decodes, the first chunk of a prompt, later ones
# that begin and end within a block, and padding.
COUNTS = (1, 1, 1, 150, 6, 80, 0, 2, 1)
CONTEXTS = (1, 81, 160, 150, 11, 160, 0, 0, 0)
# Heads of keys and of values, and their sizes.
SHAPES = ((1, 1, 8, 8), (2, 4, 16, 40), (3, 3, 12, 5))


def make_sequences(device):
    generator = torch.Generator().manual_seed(2)
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    most, num = -(-max(CONTEXTS) // SIZE), len(COUNTS)
    tables = (torch.randperm(num * most, generator=generator).int() + 1).view(num, most)
    return StateSequences(
        tables.to(device), torch.randperm(num, generator=generator).int().to(device),
        torch.tensor(CONTEXTS, dtype=torch.int32, device=device), (counts.cumsum(0).int() - counts).to(device),
        counts.to(device), SIZE,
    )  # fmt: skip


def inputs_of(shape, device, dtype=torch.float32):
    num_keys, num_values, key_size, value_size = shape
    generator = torch.Generator().manual_seed(1)
    total = sum(COUNTS)

    def random(*size, kind=torch.float32):
        return torch.randn(*size, generator=generator).to(device, kind)

    both = random(total, 2 * num_values, kind=dtype)
    given = dict(
        qkv=random(total, 2 * num_keys * key_size + num_values * value_size, kind=dtype),
        a=both[:, num_values:], b=both[:, :num_values], rates=random(num_values).exp(), bias=random(num_values),
    )  # fmt: skip
    return given, random(2 * len(COUNTS) + 1, num_values, key_size, value_size)


def computed():
    """Tokens that are not padding."""
    return torch.tensor([context > 0 for count, context in zip(COUNTS, CONTEXTS, strict=True) for _ in range(count)])


def one_by_one(shape, given, tokens):
    """The definition, from no state."""
    num_keys, num_values, key_size, value_size = shape
    q, k, v = given["qkv"][:tokens].split([num_keys * key_size] * 2 + [num_values * value_size], dim=1)
    q, k = (
        F.normalize(each.unflatten(1, (num_keys, key_size)), dim=-1, eps=0).repeat_interleave(num_values // num_keys, 1)
        for each in (q, k)
    )
    state, expected = torch.zeros(num_values, key_size, value_size, device=q.device), []
    for token, value in enumerate(v.unflatten(1, (num_values, value_size))):
        decay = (-given["rates"] * F.softplus(given["a"][token] + given["bias"])).exp()
        state = decay[:, None, None] * state
        known = torch.einsum("hkv,hk->hv", state, k[token])
        wrong = given["b"][token].sigmoid()[:, None] * (value - known)
        state = state + k[token][:, :, None] * wrong[:, None]
        expected.append(torch.einsum("hkv,hk->hv", state, q[token]) / key_size**0.5)
    return torch.stack(expected), state


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_computes_what_torch_does(device, shape, dtype):
    given, states = inputs_of(shape, device, dtype)
    ours, theirs = states.clone(), states.clone()
    actual = kernels._delta_triton(**given, states=ours, sequences=make_sequences(device))
    expected = kernels._delta_torch(**given, states=theirs, sequences=make_sequences(device))
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not expected[~computed()].any()
    assert (ours != states).flatten(1).any(1).sum() == len([count for count in CONTEXTS if count]) + 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_in_pieces_is_the_sequence_at_once(device, shape):
    """And both are what the definition says, one token after the other."""
    given, states = inputs_of(shape, device)
    length = 150
    given = {name: value[:length] if len(value) == sum(COUNTS) else value for name, value in given.items()}

    def run(pieces):
        kept, first, outs, whole = states.clone(), 0, [], make_sequences(device)
        for count in pieces:
            here = slice(first, first + count)
            first += count
            one = torch.tensor([[count], [first]], dtype=torch.int32, device=device)
            sequences = StateSequences(
                whole.block_tables, whole.rows[:1], one[1], torch.zeros_like(one[0]), one[0], SIZE
            )
            cut = {name: value[here] if len(value) == length else value for name, value in given.items()}
            outs.append(kernels.delta_rule(**cut, states=kept, sequences=sequences))
        return torch.cat(outs), kept[whole.block_tables[whole.rows[0]].long()]

    expected = one_by_one(shape, given, length)[0]
    half = one_by_one(shape, given, SIZE)[1]
    whole = one_by_one(shape, given, length)[1]
    for pieces in ([length], [1] * length, [3, 50, 97], [80, 70], [80, 1, 69]):
        actual, kept = run(pieces)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept, torch.stack((half, whole)), rtol=1e-4, atol=1e-5)


def test_strong_decays_stay_finite(device):
    """What a state keeps may be too little for float32; what is left of a later token must not be infinite."""
    given, states = inputs_of(SHAPES[0], device)
    given["rates"] = torch.full_like(given["rates"], 1000.0)
    sequences = make_sequences(device)
    for compute in (kernels._delta_torch, kernels._delta_triton):
        kept = states.clone()
        assert compute(**given, states=kept, sequences=sequences).isfinite().all()
        assert kept.isfinite().all()


def test_a_convolution_may_keep_all_channels_in_one_tensor(device):
    """The state of a delta rule has another shape than that of its convolution."""
    channels, width = 70, 4
    sequences = make_sequences(device)
    generator = torch.Generator().manual_seed(3)
    kept = torch.randn(2 * len(COUNTS) + 1, channels, width - 1, generator=generator).to(device)
    x = torch.randn(sum(COUNTS), channels, generator=generator).to(device)
    weight = torch.randn(channels, width, generator=generator).to(device)
    half = channels // 2
    halves = StateBlocks(kept[:, :half].clone(), kept[:, half:].clone(), sequences)
    expected = convolution._convolution_torch(x, weight, None, 0, halves)
    for compute in (convolution._convolution_torch, convolution._convolution_triton):
        here = kept.clone()
        actual = compute(x, weight, None, 0, StateBlocks(here, here[:, :0], sequences))
        torch.testing.assert_close(actual[computed()], expected[computed()], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(here, torch.cat((halves.lower, halves.upper), dim=1), rtol=1e-5, atol=1e-5)
