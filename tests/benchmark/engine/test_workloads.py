"""The fixed work of `legato bench engine`."""

from __future__ import annotations

import hashlib
import json

import pytest

from legato.benchmark.engine.workloads import check_names, custom, make_workloads
from legato.benchmark.options import DEFAULT_WORKLOADS
from legato.common.errors import OptionError

# Of the prompts and lengths that other engines were measured with.
DIGESTS = {
    "G1": "a4b12dd3eda50bcc",
    "G2": "b2d8fe54d41814bf",
    "G3": "9813b2db64d85e1f",
    "G4": "d4b22cd14be916ae",
}


@pytest.mark.parametrize("name", DEFAULT_WORKLOADS)
def test_the_work_is_the_same_as_for_other_engines(name: str) -> None:
    (workload,) = make_workloads([name], 1, vocab_size=128_256)
    text = json.dumps([workload.prompts, workload.new_tokens])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]
    assert not workload.prefix_caching


def test_a_small_vocabulary_changes_the_ids_and_nothing_else() -> None:
    (large,), (small,) = (make_workloads(["G4"], 1, vocab) for vocab in (128_256, 300))
    assert large.lengths == small.lengths
    assert max(max(prompt) for prompt in small.prompts) < 300


def test_a_scale_divides_counts_and_lengths() -> None:
    (workload,) = make_workloads(["G2"], 8, 300)
    assert (len(workload.prompts), len(workload.prompts[0]), workload.new_tokens[0]) == (32, 16, 32)


def test_no_scale_leaves_nothing_to_do() -> None:
    for workload in make_workloads(check_names(["all"]), 10_000, 300):
        assert workload.num_in >= len(workload.prompts) >= 1
        assert min(workload.new_tokens) == 1


def test_requests_of_the_prefix_workload_begin_alike() -> None:
    (workload,) = make_workloads(["prefix"], 1, 128_256)
    assert len(workload.prompts) == 64 and workload.prefix_caching
    assert len({tuple(prompt[:2048]) for prompt in workload.prompts}) == 1
    assert len({tuple(prompt[2048:]) for prompt in workload.prompts}) == 64


def test_its_baseline_is_one_beginning_and_all_ends() -> None:
    (workload,) = make_workloads(["prefix"], 1, 128_256)
    assert workload.baseline is not None and not workload.baseline.prefix_caching
    assert workload.baseline.num_in == 2048 + 64 * 64
    assert workload.num_in == 64 * (2048 + 64)


def test_all_requests_fit_into_the_cache_at_once() -> None:
    workload = custom(3, prompt=5, new=4, vocab_size=300)
    assert workload.cache_tokens(block_size=4) == 3 * (3 + 1) * 4


def test_an_unknown_workload_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="--workload G9: must be one of G1, G2, G3, G4, prefix or all"):
        check_names(["G1", "G9"])


def test_a_workload_that_is_named_twice_runs_once() -> None:
    assert check_names(["G2", "G1", "G2"]) == ["G2", "G1"]
