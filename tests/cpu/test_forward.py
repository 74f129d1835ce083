"""The forward of the C library against the same layers in torch, on families, ragged batches and odd lengths."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from legato.cpu.library import Library
from legato.layers.kv_cache import KVCache
from legato.layers.lora import StepAdapters
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.host import IN_TORCH, HostDecoder, on_host
from legato.models.registry import CausalModel, get_model
from legato.server.prepare import prepare
from legato.server.rows import Rows
from tests.tiny_models import tiny_llama

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 64, 16
SHAPE = dict(hidden_size=96, intermediate_size=160, head_dim=32, num_attention_heads=6, num_key_value_heads=2)


def load(folder: Path, packs: bool = True) -> CausalModel:
    files = ModelFiles.open(folder)
    return get_model(files, ModelConfig.from_hf(files.config()), torch.float32, CPU, packs=packs)


class Sequences:
    """Some sequences of random tokens and the steps that compute them."""

    def __init__(self, model: CausalModel, lengths: list[int], block_size: int = BLOCK_SIZE) -> None:
        self.model = model
        self.cache = KVCache(model.kv_shape, NUM_BLOCKS, block_size, CPU)
        self.rows = Rows(len(lengths), NUM_BLOCKS, CPU)
        generator = torch.Generator().manual_seed(1)
        block = 1
        for row, length in enumerate(lengths):
            ids = torch.randint(3, 300, (length,), generator=generator).tolist()
            count = -(-(length + 8) // block_size)
            self.rows.admit(row, row, ids, 0, False)
            self.rows.append_blocks(row, list(range(block, block + count)))
            block += count
        self.rows.write_blocks()

    @torch.inference_mode()
    def step(self, counts: dict[int, int], everything: bool = False, adapters: bool = False) -> torch.Tensor:
        """The logits of those that sample, or of all tokens. A step with adapters runs through torch."""
        parts = [self.rows.advance(row, count) for row, count in counts.items()]
        step = prepare(self.rows, parts, self.cache.block_size, self.model.kv_shape.dtype)
        if everything:
            step = replace(step, logits_indices=None)
        if adapters:
            step = replace(step, adapters=Mock(spec=StepAdapters))  # that no layer asks for anything
        return self.model.logits(self.model.forward(step, self.cache))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one key head, wide heads": dict(num_key_value_heads=1, head_dim=64),
    "as many key heads": dict(num_key_value_heads=6),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "tied": dict(tie_word_embeddings=True),
    "gelu": dict(hidden_act="gelu_pytorch_tanh"),
    "widest heads": dict(num_attention_heads=2, head_dim=256),
    "more groups than tiles sum at once": dict(hidden_size=288, intermediate_size=288),
}


# Families that add head norms, biases of q, k and v alone, a window, or heads of which a part is rotated.
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Qwen2": {},
    "Mistral": dict(sliding_window=50),
    "Phi3": dict(partial_rotary_factor=0.5, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0),
}


# With every instruction set.
COMPARED = ["biases", "Qwen3", "more groups than tiles sum at once"]


def tiny(folder: Path, family: str, **changes: Any) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{**SHAPE, "vocab_size": 320, "num_hidden_layers": 3, "max_position_embeddings": 512, **changes}
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_have_the_logits_of_torch(kernels: Library, tmp_path: Path, family: str) -> None:
    model = load(tiny(tmp_path, family, initializer_range=0.05, **OTHERS[family]))
    host = on_host(model)
    assert isinstance(host, HostDecoder)
    assert host._shape.rope_dim == (16 if family == "Phi3" else 32)
    ours, theirs = Sequences(host, [150, 20]), Sequences(model, [150, 20])
    for counts in ({0: 100}, {1: 20, 0: 50}):
        # Norms of heads enlarge what rounding does; a norm or a window left out is ten times as much.
        assert relative_error(ours.step(counts), theirs.step(counts)) < 0.04


def test_scores_are_capped_as_in_torch(kernels: Library, tmp_path: Path) -> None:
    model = load(tiny_llama(tmp_path, **SHAPE, initializer_range=0.3))
    plain = Sequences(model, [70]).step({0: 70})
    for layer in model.layers:  # type: ignore[attr-defined]
        layer.attention.attention.scoring = replace(layer.attention.attention.scoring, soft_cap=0.5)
    expected = Sequences(model, [70]).step({0: 70})
    assert relative_error(plain, expected) > 0.1
    assert relative_error(Sequences(on_host(model), [70]).step({0: 70}), expected) < 0.04


def test_frequencies_for_the_longest_sequence_reach_the_library(kernels: Library, tmp_path: Path) -> None:
    """They replace others in the table whose address the library has."""
    scaling = dict(rope_type="longrope", short_factor=[1.0] * 16, long_factor=[4.0] * 16)
    changes = dict(OTHERS["Phi3"], partial_rotary_factor=1.0, original_max_position_embeddings=128)
    model = load(tiny(tmp_path, "Phi3", **changes, rope_scaling=scaling, initializer_range=0.05))
    host = on_host(model)
    assert isinstance(host, HostDecoder)
    host.limit(128)
    short = Sequences(host, [100]).step({0: 100})
    host.limit(500)
    found, expected = Sequences(host, [100]).step({0: 100}), Sequences(model, [100]).step({0: 100})
    assert relative_error(short, expected) > 0.1
    assert relative_error(found, expected) < 0.04


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer.mlp_norm, "eps", 0.1), "its norms differ in their epsilon"),
        (
            lambda layer: setattr(
                layer.attention.attention, "scoring", replace(layer.attention.attention.scoring, scale=1.0)
            ),
            "layers differ in more than their weights and windows",
        ),
    ],
    ids=["epsilon", "scale"],
)
def test_layers_that_differ_are_left_to_torch(
    kernels: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None], reason: str
) -> None:
    """The library has these numbers once for all of them."""
    caplog.set_level("INFO")
    model = load(tiny_llama(tmp_path, **SHAPE))
    change(model.layers[1])  # type: ignore[attr-defined]
    assert on_host(model) is model
    assert f"{IN_TORCH}: {reason}" in caplog.messages


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_logits_are_those_of_torch_with_the_same_weights(kernels: Library, tmp_path: Path, changes) -> None:
    model = load(tiny_llama(tmp_path, **{**SHAPE, "initializer_range": 0.05, **changes}))
    host = on_host(model)
    assert isinstance(host, HostDecoder)
    lengths = [1, 5, 64, 65, 150]
    steps = [{0: 1, 1: 5, 2: 40, 4: 100}, {2: 24, 3: 65, 4: 50}]
    ours, theirs = Sequences(host, lengths), Sequences(model, lengths)
    for counts in steps:
        # int8 activations round the other way where sums differ in their last bits.
        assert relative_error(ours.step(counts), theirs.step(counts)) < 0.02
    for row, (mine, other) in enumerate(zip(ours.rows.sequences, theirs.rows.sequences, strict=True)):
        assert mine is not None and other is not None
        ours.rows.last_tokens[row] = theirs.rows.last_tokens[row] = 7 + row
    decodes = dict.fromkeys((4, 3, 2, 1, 0), 1)
    assert relative_error(ours.step(decodes), theirs.step(decodes)) < 0.02


def test_a_sequence_has_the_same_logits_alone_and_in_a_crowd(kernels: Library, tmp_path: Path) -> None:
    """Bit for bit, in whatever chunks its prompt is computed."""
    host = on_host(load(tiny_llama(tmp_path, **SHAPE)))
    lengths = [1, 5, 64, 70, 150]
    alone = Sequences(host, lengths).step({4: 150})
    crowd = Sequences(host, lengths)
    crowd.step({4: 33, 0: 1})
    crowd.step({3: 70, 4: 1, 1: 5})
    assert torch.equal(crowd.step({2: 64, 4: 116})[1:], alone)
    # And a decode is what the last token of a prompt is.
    other = Sequences(host, [149])
    other.rows.sequences[0].input_ids = crowd.rows[4].input_ids[:149]  # type: ignore[union-attr]
    other.step({0: 149})
    other.rows.last_tokens[0] = int(crowd.rows[4].input_ids[149])
    assert torch.equal(other.step({0: 1}), alone)


@pytest.mark.parametrize("family", COMPARED)
def test_instruction_sets_have_the_same_logits(same_with_all, tmp_path: Path, family: str) -> None:
    same_with_all(all_logits(tmp_path, family))


def all_logits(tmp_path: Path, family: str) -> Callable[[], torch.Tensor]:
    """Computes them of all layers, with inputs that are rounded twice, and of any number of tokens."""
    folder = tiny(tmp_path, family) if family in OTHERS else tiny_llama(tmp_path, **{**SHAPE, **FAMILIES[family]})
    host = on_host(load(folder))
    lengths = [1, 5, 64, 70, 150, 19]

    def logits() -> torch.Tensor:
        sequences = Sequences(host, lengths)
        steps = [{0: 1, 1: 5, 2: 13, 4: 100}, {2: 51, 3: 29}, {3: 41}, {4: 50, 5: 19}]
        return torch.cat([sequences.step(counts, everything=True) for counts in steps])

    return logits


def test_torch_goes_on_with_keys_and_values_of_the_library(kernels: Library, tmp_path: Path) -> None:
    """Steps with adapters run through torch, on the same cache; what they did not touch stays as it was."""
    host = on_host(load(tiny_llama(tmp_path, **SHAPE, initializer_range=0.05)))
    for block_size in (16, 32):
        lengths = [90, 70]
        expected = Sequences(host, lengths, block_size)
        expected.step({0: 60, 1: 40})
        texts = expected.step({0: 30, 1: 30})
        mixed = Sequences(host, lengths, block_size)
        mixed.step({0: 60, 1: 40})
        assert relative_error(mixed.step({1: 30}, adapters=True), texts[1:]) < 0.02
        assert torch.equal(mixed.step({0: 30}), texts[:1])
        mixed.rows.last_tokens[1] = expected.rows.last_tokens[1] = 7
        assert relative_error(mixed.step({1: 1}), expected.step({1: 1})) < 0.02


def test_all_logits_are_there_for_who_wants_them(kernels: Library, tmp_path: Path) -> None:
    host = on_host(load(tiny_llama(tmp_path, **SHAPE)))
    everything = Sequences(host, [70]).step({0: 70}, everything=True)
    assert everything.shape[0] == 70
    assert torch.equal(everything[-1:], Sequences(host, [70]).step({0: 70}))


def test_wanted_tokens_out_of_order_are_refused(kernels: Library, tmp_path: Path) -> None:
    host = on_host(load(tiny_llama(tmp_path, **SHAPE)))
    sequences = Sequences(host, [5, 6])
    step = prepare(sequences.rows, [sequences.rows.advance(row, 5 + row) for row in (0, 1)], BLOCK_SIZE, torch.float16)
    with pytest.raises(AssertionError, match="order"):
        host.forward(replace(step, logits_indices=torch.tensor([10, 4])), sequences.cache)


def test_the_likeliest_token_and_its_log_probability(kernels: Library, tmp_path: Path) -> None:
    host = on_host(load(tiny_llama(tmp_path, **SHAPE)))
    assert isinstance(host, HostDecoder)
    logits = torch.randn(5, 999) * 5
    logits[1, 7] = logits[1, 990] = 40.0
    logits[3, 998] = float("nan")
    logits[4, 3] = -float("inf")
    ids, logprobs = host.likeliest(logits)
    assert ids[:3].tolist() == logits[:3].argmax(-1).tolist() and ids[1] == 7
    expected = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs[:3], expected[:3], rtol=1e-5, atol=1e-5)
    assert logprobs[3:].isnan().all()


def test_a_step_in_which_nothing_is_wanted_computes_keys_and_values(kernels: Library, tmp_path: Path) -> None:
    host = on_host(load(tiny_llama(tmp_path, **SHAPE)))
    expected = Sequences(host, [40]).step({0: 40})
    sequences = Sequences(host, [40])
    step = prepare(sequences.rows, [sequences.rows.advance(0, 33)], BLOCK_SIZE, torch.float16)
    nothing = torch.empty(0, dtype=torch.int64)
    assert host.forward(replace(step, logits_indices=nothing), sequences.cache).shape == (0, SHAPE["hidden_size"])
    assert torch.equal(sequences.step({0: 7}), expected)


def test_calibration_reads_no_positions_beyond_the_last(kernels: Library, tmp_path: Path) -> None:
    """Of a model for shorter sequences than the calibration's: behind its table of rotations others' memory begins."""
    folder, states = tiny_llama(tmp_path, **SHAPE, max_position_embeddings=32, initializer_range=0.05), []
    for others in (0.0, 100.0):
        model = load(folder)
        rotary = model.rotary  # type: ignore[attr-defined]
        memory = torch.full((64, rotary.dim), others)
        memory[:32] = rotary.cos_sin
        rotary.cos_sin = memory[:32]
        host = on_host(model)
        assert isinstance(host, HostDecoder)
        states.append(host.calibrate())
    assert torch.equal(*states)


class MatrixStart(ctypes.Structure):
    """struct matrix, as far as its blocks"""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "groups", "num_blocks")),
        ("bias", ctypes.c_void_p),
        ("at", ctypes.POINTER(ctypes.c_int32)),
    ]


def test_an_eighth_of_the_inputs_is_rounded_twice_the_coarsest_ones(kernels: Library, tmp_path: Path) -> None:
    model = load(tiny_llama(tmp_path, **SHAPE, initializer_range=0.05))
    for number, layer in enumerate(model.layers):  # type: ignore[attr-defined]
        layer.norm.weight[40 if number else 70] = layer.mlp_norm.weight[5] = 60.0
    host = on_host(model)
    assert isinstance(host, HostDecoder)
    for number, layer in enumerate(host._layers):
        twice = {}
        for name in ("qkv", "output", "gate_up", "down"):
            start = MatrixStart.from_address(getattr(layer, name).address)
            twice[name] = [group for group in range(start.groups) if start.at[group + 1] - start.at[group] == 2]
            assert start.at[start.groups] == start.groups + len(twice[name])
        assert (twice["qkv"], twice["gate_up"]) == ([1 if number else 2], [0])
        assert (len(twice["output"]), len(twice["down"])) == (1, 1)  # of 6 and of 5
