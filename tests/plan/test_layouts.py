"""Layouts over machines: what each GPU holds and what goes over links, by hand for Llama 3.1's shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legato.plan.cli import PlanOptions, make_plan
from legato.plan.layouts import Layout, Machines, best, layouts
from legato.plan.memory import MemoryPlan
from legato.plan.spread import Spread
from tests.plan.test_plan import plan_json

MACHINES = Machines(count=4, gpus=8, network=25e9, fabric=450e9)


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    return make_plan(PlanOptions(model_id="llama-8b", memory="80GiB"))


def find(found: list[Layout], tensor: int, stages: int) -> Layout:
    (one,) = [each for each in found if (each.tensor, each.stages) == (tensor, stages)]
    return one


def test_every_gpu_has_a_place_and_one_machine_has_one_tensor_group(plan: MemoryPlan) -> None:
    found = layouts(plan, MACHINES)
    assert {(each.tensor, each.stages): each.replicas for each in found} == {
        **{(1, 1): 32, (2, 1): 16, (4, 1): 8, (8, 1): 4},
        **{(8, 2): 2, (8, 3): 1, (8, 4): 1},
    }
    assert not any(each.over_network for each in found)


def test_links_carry_two_all_reduces_per_layer_and_the_hidden_state_once_per_stage(
    plan: MemoryPlan,
) -> None:
    found = layouts(plan, MACHINES)
    hidden = 4096 * 2
    assert find(found, 1, 1).reduced == 0 and find(found, 1, 1).link_seconds == 0
    assert find(found, 4, 1).reduced == 2 * 32 * 2 * 3 * hidden // 4
    staged = find(found, 8, 4)
    assert staged.passed == hidden
    assert staged.link_seconds == pytest.approx(128 * (staged.reduced / 450e9 + 3 * hidden / 25e9))


def test_stages_share_weights_and_cache_and_keep_the_largest_vocabulary(plan: MemoryPlan) -> None:
    found = layouts(plan, MACHINES)
    whole, halves = find(found, 8, 1), find(found, 8, 2)
    vocabulary = 128_256 * 4096 * 2 // 8
    assert halves.weights == (whole.weights - vocabulary) // 2 + vocabulary
    assert halves.bytes_per_token * 2 == whole.bytes_per_token
    assert halves.tokens > 1.9 * whole.tokens


def test_the_best_layout_has_the_fewest_gpus_that_hold_a_whole_sequence(plan: MemoryPlan) -> None:
    chosen = best(plan, layouts(plan, MACHINES))
    assert chosen is not None and (chosen.tensor, chosen.stages, chosen.replicas) == (1, 1, 32)
    small = make_plan(PlanOptions(model_id="llama-8b", memory="5GiB"))
    chosen = best(small, layouts(small, MACHINES))
    assert chosen is not None and chosen.tensor == 8 and chosen.stages > 1, "one machine holds no whole sequence"
    tiny = make_plan(PlanOptions(model_id="llama-8b", memory="1GiB"))
    assert best(tiny, layouts(tiny, MACHINES)) is None


def test_all_reduces_leave_a_machine_only_if_it_has_too_few_gpus(plan: MemoryPlan) -> None:
    found = layouts(plan, Machines(count=4, gpus=1, network=25e9, fabric=450e9))
    across = find(found, 4, 1)
    assert across.over_network and across.replicas == 1
    assert across.link_seconds == pytest.approx(128 * across.reduced / 25e9)
    chosen = best(plan, found)
    assert chosen is not None and not chosen.over_network


def test_commands_name_machines_ports_and_the_balancer(plan: MemoryPlan) -> None:
    words = ["text-generation-launcher", "--model-id", "me/model", "--dtype", "bfloat16"]
    launcher, route, ray = Spread(plan, MACHINES, words).commands()
    assert "--num-shard 1 --port 3001" in launcher and "8 times" in launcher
    assert "32 replicas" in route and "http://MACHINE:3001" in route
    assert ray.endswith("legato ray --model-id me/model --replicas 32 --tensor-parallel 1 -- --dtype bfloat16")
    small = replace(plan, device=replace(plan.device, memory=5 << 30))
    group = Spread(small, Machines(2, 8, 25e9, 450e9), words).commands()[0]
    assert "--nnodes 2" in group and "--pipeline-parallel-size 2" in group and "--num-shard 8" in group


def test_the_command_prints_layouts_only_if_it_is_asked_for_machines() -> None:
    assert "layouts" not in plan_json("llama-8b", "--memory", "80GiB")
    found = plan_json("llama-8b", "--memory", "80GiB", "--machines", "2", "--gpus-per-machine", "4")
    assert found["best_layout"]["replicas"] == 8 and found["machines"]["gpus"] == 4
    assert found["commands"] == [], "a shape without weights cannot be served"
