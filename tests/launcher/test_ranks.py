"""Which machine a launcher is on: by flags, by LeaderWorkerSet's variables, by torchrun's."""

from __future__ import annotations

import pytest

from legato.common.errors import OptionError
from legato.common.options import LauncherOptions
from legato.launcher.ranks import layout_of, placed

KEY = "0123456789abcdef"


def options(**given: object) -> LauncherOptions:
    return LauncherOptions(given=frozenset(given), **given)  # type: ignore[arg-type]


def test_flags_win_over_variables() -> None:
    given = options(nnodes=3, node_rank=2, master_addr="10.0.0.1", cluster_key=KEY)
    found = placed(given, {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "RANK": "0", "WORLD_SIZE": "2"})
    assert (found.nnodes, found.node_rank, found.master_addr) == (3, 2, "10.0.0.1")


def test_leader_worker_set() -> None:
    environ = {"LWS_LEADER_ADDRESS": "legato-0.legato", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    found = placed(options(cluster_key=KEY), environ)
    assert (found.nnodes, found.node_rank, found.master_addr) == (2, 1, "legato-0.legato")


def test_torchrun() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    given = options(cluster_key=KEY, master_addr="10.0.0.1", master_port=4000)
    assert (placed(given, environ).nnodes, placed(given, environ).node_rank) == (2, 1)
    assert placed(given, environ).master_port == 4000
    assert placed(given, environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).master_port == 4001
    with pytest.raises(OptionError, match="--nproc-per-node 1"):
        placed(given, environ | {"LOCAL_WORLD_SIZE": "8"})


def test_one_machine_needs_no_key_and_a_pipeline_on_it_gets_one() -> None:
    assert placed(options(), {}).cluster_key is None
    first, second = (placed(options(pipeline_parallel_size=2), {}).cluster_key for _ in range(2))
    assert first and second and first != second


def test_a_key_file(tmp_path: object) -> None:
    file = f"{tmp_path}/key"
    with open(file, "w") as opened:
        opened.write(f"{KEY}\n")
    given = options(nnodes=2, node_rank=1, master_addr="10.0.0.1", cluster_key_file=file)
    assert placed(given, {}).cluster_key == KEY


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(nnodes=2, master_addr="10.0.0.1"), "--nnodes needs --cluster-key"),
        (dict(nnodes=2, cluster_key=KEY), "--nnodes needs --master-addr"),
        (dict(nnodes=2, node_rank=2, cluster_key=KEY), r"--node-rank \(2\) must be less than --nnodes \(2\)"),
        (dict(nnodes=2, master_addr="10.0.0.1", cluster_key="short"), "needs at least 16"),
        (dict(node_rank=0), "add --nnodes"),
    ],
)
def test_what_is_missing_or_wrong_is_named(given: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        placed(options(**given), {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(pipeline_parallel_size=2, speculate=3), "--speculate cannot be combined"),
        (dict(pipeline_parallel_size=2, fake=True), "--fake cannot be combined"),
        (dict(pipeline_parallel_size=2, task="embed"), "--task embed runs on one device"),
        (dict(pipeline_parallel_size=3), "must divide the number of shards"),
        (dict(pipeline_parallel_size=2, master_port=65535), "leaves no room for the ports"),
    ],
)
def test_pipelines_refuse_what_no_stage_can_do_alone(given: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        layout_of(options(**given), 2)
