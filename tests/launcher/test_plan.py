"""The commands that a plan consists of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from legato.common.options import LauncherOptions
from legato.launcher.plan import make_plan

SOCKETS = ["/tmp/x-0", "/tmp/x-1"]


def test_every_shard_gets_its_rank_and_the_common_socket_path() -> None:
    options = LauncherOptions(model_id="some/model", shard_uds_path="/tmp/x", master_port=1234)
    shards = make_plan(options, SOCKETS, {}).shards
    assert [shard.name for shard in shards] == ["shard-0", "shard-1"]
    for rank, shard in enumerate(shards):
        assert list(shard.words[-5:]) == [
            "serve",
            "some/model",
            "--json-output",
            "--master-port=1234",
            "--uds-path=/tmp/x",
        ]
        assert shard.environ["RANK"] == str(rank)
        assert shard.environ["WORLD_SIZE"] == "2"
        assert shard.environ["MASTER_ADDR"] == "localhost"
        assert shard.environ["MASTER_PORT"] == "1234"


def test_the_router_connects_to_the_first_shard() -> None:
    plan = make_plan(LauncherOptions(model_id="some/model", port=80), SOCKETS, {})
    assert list(plan.router.words[-4:]) == [
        "--tokenizer-name=some/model",
        "--port=80",
        "--json-output",
        "--master-shard-uds-path=/tmp/x-0",
    ]


def test_without_a_model_the_programs_choose_the_same_default() -> None:
    plan = make_plan(LauncherOptions(), SOCKETS, {})
    assert plan.download is not None
    assert list(plan.download.words[-2:]) == ["download-weights", "--json-output"]
    assert not any(word.startswith("--tokenizer-name") for word in plan.router.words)


def test_children_do_not_see_variables_that_became_arguments() -> None:
    environ = {
        "HOSTNAME": "3f2a9c1d0b7e",
        "LOG_LEVEL": "debug",
        "MAX_INPUT_LENGTH": "7",
        "HF_TOKEN": "secret",
        "RANK": "9",
    }
    plan = make_plan(LauncherOptions(), SOCKETS, environ)
    for command in (plan.router, plan.shards[0], plan.download):
        assert command is not None
        assert not {"HOSTNAME", "LOG_LEVEL", "MAX_INPUT_LENGTH"} & set(command.environ)
        assert command.environ["HF_TOKEN"] == "secret"
    assert plan.shards[0].environ["RANK"] == "0"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=4"}, "glibc.malloc.tcache_count=4:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_shards_use_huge_pages_unless_overridden(given: dict[str, str], expected: str) -> None:
    plan = make_plan(LauncherOptions(), SOCKETS, given)
    assert plan.shards[0].environ["GLIBC_TUNABLES"] == expected
    assert plan.router.environ.get("GLIBC_TUNABLES") == given.get("GLIBC_TUNABLES")


def test_a_model_on_disk_needs_no_download(tmp_path: Path) -> None:
    assert make_plan(LauncherOptions(model_id=str(tmp_path)), SOCKETS, {}).download is None


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_on_disk_are_converted_before_shards_start(tmp_path: Path, name: str) -> None:
    for file in ("config.json", name):
        (tmp_path / file).touch()
    assert make_plan(LauncherOptions(model_id=str(tmp_path)), SOCKETS, {}).download is not None
    (tmp_path / "model.safetensors").touch()
    assert make_plan(LauncherOptions(model_id=str(tmp_path)), SOCKETS, {}).download is None


def test_programs_are_found_next_to_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "text-generation-router").touch()
    plan = make_plan(LauncherOptions(), SOCKETS, {})
    assert plan.router.words[0] == str(tmp_path / "text-generation-router")
    assert list(plan.shards[0].words[:3]) == [str(tmp_path / "python"), "-m", "legato.server.cli"]


def test_api_keys_are_passed_as_a_variable_because_command_lines_are_public() -> None:
    plan = make_plan(LauncherOptions(api_key=("first-secret", "second-secret")), ["/tmp/s-0"], {})
    assert plan.router.environ["API_KEY"] == "first-secret,second-secret"
    assert not any("secret" in word for word in plan.router.words)
    assert "API_KEY" not in plan.shards[0].environ
