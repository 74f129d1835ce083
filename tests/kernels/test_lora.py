from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from legato.kernels.grouped_linear import _group_rows_torch
from legato.kernels.lora import product, tiles
from legato.kernels.lora.pages import PAGE_RANKS, LoraPages, LoraPlace
from legato.kernels.lora.product import LoraConfig
from legato.kernels.lora.tiles import LoraGroups

SMALL = LoraConfig(block_m=16, block_n=32, block_k=32, block_r=16, splits=1)
SPLIT = replace(SMALL, splits=3, block_r=32)
# Ranks of the adapters, and the adapter of each row; None: no adapter.
CASES = {
    "one-row": ([8], [0]),
    "none": ([8, 16], [None] * 5),
    "mixed-ranks": ([1, 8, 24, 64], [3, None, 0, 1, 1, None, 2, 3, 0, None]),
    "an-adapter-that-skips-the-layer": ([0, 5], [0, 1, 0, 1]),
    "several-tiles-and-a-rest": ([9, 17], [1] * 33 + [0] * 3 + [None] * 20 + [1] * 2),
    "every-row-its-own": ([4] * 5, list(range(5))),
}


def pages_of(ranks: list[int], place: LoraPlace, randn, device, dtype=torch.float32, max_rank=64) -> LoraPages:
    """Adapters of these ranks in scattered pages. Everything beyond a rank is not a number."""
    needed = [max(1, -(-rank // PAGE_RANKS)) for rank in ranks]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist()
    page_size = place.b_begin + place.b_size + 5
    pages = torch.full((sum(needed), page_size), float("nan"), dtype=dtype, device=device)
    table = torch.zeros(len(ranks) + 1, max_rank // PAGE_RANKS, dtype=torch.int32, device=device)
    for slot, (rank, count) in enumerate(zip(ranks, needed, strict=True)):
        mine = [order.pop() for _ in range(count)]
        table[slot, :count] = torch.tensor(mine)
        for number, page in enumerate(mine):
            left = min(PAGE_RANKS, rank - number * PAGE_RANKS)
            a = pages[page, place.a_begin : place.a_begin + place.a_size].view(PAGE_RANKS, -1)
            b = pages[page, place.b_begin : place.b_begin + place.b_size].view(PAGE_RANKS, -1)
            a[:left] = randn(left, a.shape[1], dtype=dtype) / place.in_features**0.5
            b[:left] = randn(left, b.shape[1], dtype=dtype)
    ranks_there = torch.tensor([[7] * (len(ranks) + 1), [*ranks, 0]], dtype=torch.int32, device=device)
    return LoraPages(pages, table, ranks_there)


def expected(out, x, ids, pages, place, scale=None):
    """Row by row, in float64."""
    result = out.double().clone()
    share = ids.numel() // x.shape[0]
    for row, group in enumerate(ids.flatten().tolist()):
        slot, expert = divmod(group, place.num_experts)
        if slot == pages.num_slots:
            continue
        for r in range(int(pages.ranks[place.index, slot])):
            page = pages.pages[pages.table[slot, r // PAGE_RANKS]].double()
            a = page[place.a_begin :][: place.a_size].view(PAGE_RANKS, place.num_parts, place.num_experts, -1)
            b = page[place.b_begin :][: place.b_size].view(PAGE_RANKS, place.num_experts, -1)[r % PAGE_RANKS, expert]
            shrunk = a[r % PAGE_RANKS, :, expert] @ x[row // share].double()
            spread = torch.cat([value.expand(size) for value, size in zip(shrunk, place.out_sizes, strict=True)])
            result[row] += spread * b * (1.0 if scale is None else scale[row].double())
    return result


@pytest.fixture(params=CASES)
def case(request, device):
    ranks, slots = CASES[request.param]
    ids = torch.tensor([[len(ranks) if slot is None else slot] for slot in slots], device=device)
    return ranks, ids


@pytest.mark.parametrize(("sizes", "config"), [((40,), SMALL), ((33, 8, 24), SPLIT)], ids=["one-part", "qkv-split"])
def test_adds_what_each_rows_adapter_says(randn, device, assert_close, case, sizes, config):
    ranks, ids = case
    place = LoraPlace(1, 3, 3 + PAGE_RANKS * len(sizes) * 72, 72, sizes)
    pages = pages_of(ranks, place, randn, device)
    groups = LoraGroups(_group_rows_torch(ids, len(ranks)))
    x, out = randn(len(ids), 72), randn(len(ids), sum(sizes))
    wanted = expected(out, x, ids, pages, place).to(out.dtype)
    assert_close(product._lora_add_torch(out.clone(), x, groups, pages, place, None), wanted)
    assert_close(product._lora_add_triton(out.clone(), x, groups, pages, place, None, config), wanted)


def test_programs_go_on_with_the_tiles_that_are_left(randn, device, assert_close, monkeypatch):
    monkeypatch.setattr(tiles, "MOST_PROGRAMS", 2)
    ranks, slots = [9, 17, 3, 8], [1] * 33 + [0] * 3 + [None] * 20 + [3] * 2 + [1, 2, 0]
    ids = torch.tensor([[len(ranks) if slot is None else slot] for slot in slots], device=device)
    groups = LoraGroups(_group_rows_torch(ids, len(ranks)))
    found = groups.tiles(SMALL.block_m).tolist()
    count = found[0][0]
    # Groups of 4, 34, 1 and 2 rows, 16 to a tile, and no tile for rows without an adapter.
    assert found[1 : 1 + count] == [[0, 0, 4], [1, 4, 38], [1, 20, 38], [1, 36, 38], [2, 38, 39], [3, 39, 41]]
    assert groups.num_programs(SMALL.block_m) == 2
    place = LoraPlace(1, 0, PAGE_RANKS * 72, 72, (40,))
    pages = pages_of(ranks, place, randn, device)
    x, out = randn(len(ids), 72), randn(len(ids), 40)
    wanted = expected(out, x, ids, pages, place).to(out.dtype)
    assert_close(product._lora_add_triton(out.clone(), x, groups, pages, place, None, SMALL), wanted)


@pytest.mark.parametrize("is_shared", [True, False], ids=["a-row-for-each-token", "a-row-for-each-expert"])
def test_experts_have_matrices_of_their_own(randn, device, assert_close, is_shared):
    place = LoraPlace(1, 0, PAGE_RANKS * 2 * 3 * 32, 32, (24, 24), num_experts=3)
    pages = pages_of([8, 12], place, randn, device)
    # Adapter times three plus expert, of two experts for each token; the third token has no adapter.
    ids = torch.tensor([[0, 2], [4, 3], [6, 6], [2, 1]], device=device)
    groups = LoraGroups(_group_rows_torch(ids, 6))
    x, out, scale = randn(4 if is_shared else 8, 32), randn(8, 48), randn(8)
    wanted = expected(out, x, ids, pages, place, scale).to(out.dtype)
    assert_close(product._lora_add_torch(out.clone(), x, groups, pages, place, scale), wanted)
    assert_close(product._lora_add_triton(out.clone(), x, groups, pages, place, scale, SMALL), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_torch_in_16_bits_and_adds_to_float32_parts(randn, device, assert_close, dtype):
    place = LoraPlace(1, 0, PAGE_RANKS * 64, 64, (48,))
    pages = pages_of([16, 24], place, randn, device, dtype)
    groups = LoraGroups(_group_rows_torch(torch.tensor([[1], [0], [2], [1]], device=device), 2))
    x = randn(4, 64, dtype=dtype)
    for out in (randn(4, 48, dtype=dtype), randn(4, 48)):
        wanted = product._lora_add_torch(out.clone(), x, groups, pages, place, None)
        actual = product._lora_add_triton(out.clone(), x, groups, pages, place, None, SMALL)
        assert_close(actual.to(dtype), wanted.to(dtype))


def test_embeddings_look_up_columns_of_a(randn, device, assert_close):
    place = LoraPlace(1, 4, 4 + PAGE_RANKS * 11, 11, (20,))
    pages = pages_of([3, 18], place, randn, device, max_rank=24)
    slots, ids = torch.tensor([1, 2, 0, 1], device=device), torch.tensor([10, 4, 0, 7], device=device)
    one_hot = torch.nn.functional.one_hot(ids, 11).float()
    out = randn(4, 20)
    wanted = expected(out, one_hot, slots[:, None], pages, place).to(out.dtype)
    groups = LoraGroups(_group_rows_torch(slots[:, None], 2))
    shrunk = product.gather_ranks(ids, slots, pages, place)
    assert_close(product._lora_expand_torch(out.clone(), shrunk, groups, pages, place), wanted)
    assert_close(product._lora_expand_triton(out.clone(), shrunk, groups, pages, place), wanted)
