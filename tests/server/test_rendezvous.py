"""The process group of several shards is nobody else's: it listens on the loopback interface alone."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from contextlib import closing

import psutil
import pytest
import torch

from legato.common.sockets import free_port
from legato.server import rendezvous
from legato.server.rendezvous import resolve
from tests.integration.processes import environment

JOIN = """
import sys, torch
from legato.common.options import ServerOptions
from legato.server.rendezvous import join
rank, port, master = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
group = sys.argv[4]
options = ServerOptions(rank=rank, world_size=2, master_addr=master, master_port=port, group_id=group)
try:
    join(options, torch.device("cpu"))
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
sum = torch.ones(1)
torch.distributed.all_reduce(sum)
print(int(sum), flush=True)
sys.stdin.read()
"""


def start(rank: int, port: int, master: str = "localhost", group: str = "") -> subprocess.Popen[str]:
    words = [sys.executable, "-c", JOIN, str(rank), str(port), master, group]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environment(), **pipes)  # type: ignore[call-overload, no-any-return]


def listening_addresses(process: subprocess.Popen[str]) -> set[str]:
    found = psutil.Process(process.pid).net_connections(kind="tcp")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def test_shards_of_one_machine_listen_on_loopback_alone() -> None:
    port = free_port()
    shards = [start(rank, port) for rank in range(2)]
    try:
        for shard in shards:
            assert shard.stdout is not None and shard.stdout.readline() == "2\n"
        addresses = set.union(*(listening_addresses(shard) for shard in shards))
        assert addresses and all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses
    finally:
        for shard in shards:
            shard.kill()
            shard.wait()


def test_a_port_in_use_and_an_address_of_another_machine_are_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        taken, foreign = start(0, port), start(0, free_port(), "192.0.2.1")
        assert f"EndpointInUse: --master-port {port}" in taken.communicate(timeout=60)[1]
        assert "OptionError" in (said := foreign.communicate(timeout=60)[1]) and "--master-addr" in said


def test_shards_of_another_server_on_the_same_port_do_not_join() -> None:
    """They come before that server's first shard learns that the port is taken."""
    port = free_port()
    stranger, *shards = start(1, port, group="b"), start(0, port, group="a"), start(1, port, group="a")
    try:
        for shard in shards:
            assert shard.stdout is not None and shard.stdout.readline() == "2\n"
        assert stranger.poll() is None
    finally:
        for process in (stranger, *shards):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_localhost_is_an_ipv4_address_where_there_is_one(name: str) -> None:
    assert resolve(name, 29500) == "127.0.0.1"


@pytest.mark.parametrize(
    ("cores", "num_shards", "set_by_user", "expected"),
    [(64, 1, False, 8), (3, 1, False, 3), (3, 2, False, 1), (64, 2, False, 4), (1, 2, False, 1), (3, 1, True, 8)],
)
def test_torch_has_as_many_threads_as_the_container_has_cpus(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_shards: int, set_by_user: bool, expected: int
) -> None:
    threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(rendezvous, "usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
    rendezvous.share_cores(num_shards)
    assert threads[-1] == expected
