"""What each shard gets of a checkpoint: every layout of q, k and v, cut by heads, put together again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from legato.common.errors import UnsupportedModel
from legato.layers.shard import Heads, Shard
from legato.models.sources import SafetensorsSource
from legato.models.weights import Weights

CPU = torch.device("cpu")
HIDDEN = 8


def weights_of(folder: Path, tensors: dict[str, torch.Tensor], world_size: int) -> list[Weights]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    source = SafetensorsSource([folder / "model.safetensors"])
    return [Weights(source, torch.float32, CPU, Shard(rank, world_size)) for rank in range(world_size)]


def projections(num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> list[torch.Tensor]:
    """q, k and v [heads, head_dim, in + 1], the last column for the bias."""
    torch.manual_seed(0)
    sizes = ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, v_head_dim))
    return [torch.randn(*size, HIDDEN + 1) for size in sizes]


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "concatenated":
        return torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    groups = q.unflatten(0, (k.shape[0], -1))
    return torch.cat([torch.cat([*groups[i], k[i], v[i]]) for i in range(k.shape[0])])


def expected_rows(heads: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    kv = slice(heads.first_kv, heads.last_kv)
    return torch.cat([part.flatten(0, 1) for part in (q[heads.first : heads.last], k[kv], v[kv])])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["separate", "concatenated", "grouped"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "world_size"),
    [(4, 4, 1), (4, 4, 2), (7, 7, 2), (6, 2, 1), (6, 2, 2), (6, 2, 4), (6, 3, 2), (5, 1, 2), (8, 3 - 1, 3)],
)
@pytest.mark.parametrize("v_head_dim", [4, 2])
def test_heads_of_every_layout(
    tmp_path: Path, num_heads: int, num_kv_heads: int, world_size: int, layout: str, transposed: bool, v_head_dim: int
) -> None:
    q, k, v = projections(num_heads, num_kv_heads, 4, v_head_dim)
    if layout == "separate":
        matrices = {f"{name}_proj": part.flatten(0, 1) for name, part in zip("qkv", (q, k, v), strict=True)}
        names: str | list[str] = list(matrices)
    else:
        matrices, names = {"qkv": fused(q, k, v, layout)}, "qkv"
    tensors = {f"{name}.weight": m[:, :-1].T if transposed else m[:, :-1] for name, m in matrices.items()}
    tensors |= {f"{name}.bias": matrix[:, -1] for name, matrix in matrices.items()}
    x = torch.randn(3, HIDDEN)
    for weights in weights_of(tmp_path, tensors, world_size):
        heads = weights.heads(num_heads, num_kv_heads, 4, v_head_dim)
        layouts = {} if layout == "separate" else {"layout": layout}
        linear = weights.qkv(names, heads, HIDDEN, bias=True, transposed=transposed, **layouts)  # type: ignore[arg-type]
        rows = expected_rows(heads, q, k, v)
        torch.testing.assert_close(linear(x), x @ rows[:, :-1].T + rows[:, -1])
        weights.check_all_used()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "world_size"), [(4, 4, 3), (6, 2, 4), (6, 3, 2), (12, 3, 8), (5, 1, 5)]
)
def test_every_query_head_is_on_one_shard_with_its_key(num_heads: int, num_kv_heads: int, world_size: int) -> None:
    shares = [Shard(rank, world_size).heads(num_heads, num_kv_heads, 16) for rank in range(world_size)]
    assert [head for share in shares for head in range(share.first, share.last)] == list(range(num_heads))
    group = num_heads // num_kv_heads
    for share in shares:
        assert share.num_heads > 0 and share.num_heads % share.num_kv_heads == 0
        per_key = share.num_heads // share.num_kv_heads
        for i in range(share.num_heads):
            assert (share.first + i) // group == share.first_kv + i // per_key


def test_more_shards_than_heads_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"4 attention heads, too few for 5 shards; lower --num-shard"):
        Shard(0, 5).heads(4, 2, 16)


def test_neighbours_that_turn_together_come_half_a_head_apart(tmp_path: Path) -> None:
    """Scores of pairs turned as GPT-J does are those of halves turned as Rotary does."""
    q, k, v = projections(2, 2, 8, 8)
    (weights,) = weights_of(tmp_path, {"qkv.weight": fused(q, k, v, "concatenated")[:, :-1]}, 1)
    linear = weights.qkv("qkv", weights.heads(2, 2, 8), HIDDEN, neighbours=6)
    x = torch.randn(1, HIDDEN)
    heads = linear(x).view(6, 8)
    plain = (fused(q, k, v, "concatenated")[:, :-1] @ x[0]).view(6, 8)
    assert torch.allclose(heads[:4, :3], plain[:4, 0:6:2]) and torch.allclose(heads[:4, 3:6], plain[:4, 1:6:2])
    assert torch.allclose(heads[:4, 6:], plain[:4, 6:]) and torch.allclose(heads[4:], plain[4:])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_sum_over_the_shards_is_the_product_and_a_bias_counts_once(
    tmp_path: Path, world_size: int, transposed: bool
) -> None:
    up, down, bias = torch.randn(2 * 10, HIDDEN), torch.randn(HIDDEN, 10), torch.randn(HIDDEN)
    tensors = {"up.weight": up.T if transposed else up, "down.weight": down.T if transposed else down}
    x, total = torch.randn(3, HIDDEN), torch.zeros(3, HIDDEN)
    for weights in weights_of(tmp_path, {**tensors, "down.bias": bias}, world_size):
        gate_up = weights.column("up", 10, HIDDEN, fused=2, transposed=transposed)
        row = weights.row("down", HIDDEN, 10, bias=True, transposed=transposed, reduce=False)
        gate, inner = gate_up(x).chunk(2, dim=-1)
        total += row(gate * inner)
        weights.check_all_used()
    gate, inner = (x @ up.T).chunk(2, dim=-1)
    torch.testing.assert_close(total, (gate * inner) @ down.T + bias)


def test_a_vocabulary_that_does_not_divide_is_filled_up_with_zeros(tmp_path: Path) -> None:
    table = torch.randn(10, HIDDEN)
    shares = [weights.embedding("e", 10, HIDDEN) for weights in weights_of(tmp_path, {"e.weight": table}, 4)]
    assert [(share.first, len(share.weight)) for share in shares] == [(0, 3), (3, 3), (6, 3), (9, 3)]
    assert torch.equal(torch.cat([share.weight for share in shares])[:10], table)
    assert not shares[3].weight[1:].any()


def test_only_the_wanted_ranges_are_read(tmp_path: Path) -> None:
    experts = torch.randn(3, 4, 6)
    (weights,) = weights_of(tmp_path, {"experts": experts}, 1)
    read: list[tuple[slice, ...]] = []
    source = weights._source
    original = source.read
    source.read = lambda name, index: read.append(index) or original(name, index)  # type: ignore[method-assign,func-returns-value]
    wanted = weights.tensor("experts", (3, 4, 6), {1: [(3, 4), (0, 1)]})
    assert torch.equal(wanted, experts[:, [3, 0]])
    assert read == [(slice(0, 3), slice(3, 4)), (slice(0, 3), slice(0, 1))]
