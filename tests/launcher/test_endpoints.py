"""Ports and sockets that are free, in use, stale or something else."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest

from legato.common.errors import EndpointInUse, OptionError
from legato.common.sockets import browser_url
from legato.launcher.endpoints import LOCKED, check_port, claim_sockets, is_healthy, socket_path


def test_a_free_port_is_free(free_port: int) -> None:
    check_port("127.0.0.1", free_port)
    check_port("0.0.0.0", free_port)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_with_a_listener_is_in_use(address: str, free_port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port))
        other.listen()
        with pytest.raises(EndpointInUse, match=f"port {free_port} .* --port"):
            check_port(address, free_port)


def test_an_address_of_another_machine_is_refused(free_port: int) -> None:
    with pytest.raises(OptionError, match="--hostname"):
        check_port("192.0.2.1", free_port)


def test_sockets_are_named_after_their_rank(tmp_path: Path) -> None:
    with claim_sockets(f"{tmp_path}/shard", 2) as sockets:
        assert sockets == [f"{tmp_path}/shard-0", f"{tmp_path}/shard-1"]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with claim_sockets(f"{tmp_path}/shard", 1) as (path,), socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
    assert list(tmp_path.iterdir()) == []


def test_a_live_server_keeps_its_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/shard-0")
        server.listen()
        with pytest.raises(EndpointInUse, match="--shard-uds-path"), claim_sockets(f"{tmp_path}/shard", 1):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0"]


def test_a_stale_socket_is_removed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/shard-0")
        server.listen()
    with claim_sockets(f"{tmp_path}/shard", 1) as (path,):
        assert not os.path.exists(path)


def test_two_claims_exclude_each_other_before_there_is_a_socket(tmp_path: Path) -> None:
    with (
        claim_sockets(f"{tmp_path}/shard", 1),
        pytest.raises(EndpointInUse, match="--shard-uds-path"),
        claim_sockets(f"{tmp_path}/shard", 1),
    ):
        pass
    with claim_sockets(f"{tmp_path}/shard", 1):
        pass


def test_a_file_that_is_not_a_socket_is_kept(tmp_path: Path) -> None:
    (tmp_path / "shard-0").write_text("precious")
    with pytest.raises(OptionError, match="is not a socket"), claim_sockets(f"{tmp_path}/shard", 1):
        pass
    assert (tmp_path / "shard-0").read_text() == "precious"


@pytest.mark.parametrize("path", ["no/such/folder/shard", "x" * 120])
def test_an_impossible_path_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(OptionError, match="--shard-uds-path"), claim_sockets(str(tmp_path / path), 1):
        pass


# ---- other users of the machine --------------------------------------------------------------------------------------


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


def test_by_default_sockets_are_in_a_folder_that_only_this_user_can_enter(own_tmp: Path) -> None:
    with socket_path(None) as path, claim_sockets(path, 1) as (name,):
        for folder in (Path(name).parent, Path(name).parent.parent):
            assert folder.stat().st_mode & 0o777 == 0o700
        with socket_path(None) as other:
            assert other != path
    assert list((own_tmp / f"legato-{os.geteuid()}").iterdir()) == []


def test_a_path_that_is_given_is_used_as_it_is(tmp_path: Path) -> None:
    with socket_path(f"{tmp_path}/mine") as path:
        assert path == f"{tmp_path}/mine"


@pytest.mark.parametrize("squatter", ["a folder that others may enter", "a link", "a file"])
def test_whoever_occupies_the_name_of_our_folder_does_not_get_our_sockets(own_tmp: Path, squatter: str) -> None:
    name, trap = own_tmp / f"legato-{os.geteuid()}", own_tmp / "trap"
    trap.mkdir(mode=0o777)
    if squatter == "a link":
        name.symlink_to(trap)
    elif squatter == "a file":
        name.touch()
    else:
        name.mkdir()
        name.chmod(0o777)
    before = set(own_tmp.iterdir())
    with socket_path(None) as path:
        folder = Path(path).parent
        assert folder.parent not in (name, trap) and folder.stat().st_mode & 0o777 == 0o700
    assert set(own_tmp.iterdir()) == before


def test_a_lock_that_another_launcher_is_about_to_take_is_left_alone(own_tmp: Path) -> None:
    """It makes the file first, and locks it then."""
    with socket_path(None) as path:
        Path(f"{path}.lock").touch()
        with socket_path(None), claim_sockets(path, 1) as (name,):
            assert Path(name).parent.is_dir()


@pytest.mark.parametrize("runtime", ["a folder that is not there", "a long path"])
def test_a_runtime_folder_that_cannot_be_used_is_not(
    own_tmp: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_tmp / "nothing" / "nowhere"))
    if runtime == "a long path":
        long = own_tmp / ("x" * 100)
        long.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with socket_path(None) as path, claim_sockets(path, 1):
        assert Path(path).parent.parent == own_tmp / f"legato-{os.geteuid()}"


def test_without_a_folder_to_write_to_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(OptionError, match=r"TMPDIR.*--shard-uds-path"), socket_path(None):
        pass


def test_what_a_killed_launcher_left_is_removed_and_what_a_running_one_has_is_not(own_tmp: Path) -> None:
    parent = own_tmp / f"legato-{os.geteuid()}"
    dead = parent / "dead"
    dead.mkdir(parents=True, mode=0o700)
    parent.chmod(0o700)
    (dead / "shard.lock").write_bytes(LOCKED)
    (dead / "shard-0").touch()
    with socket_path(None) as path, claim_sockets(path, 1), socket_path(None):
        assert not dead.exists()
        assert os.path.exists(f"{path}.lock")


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (tmp_path / "shard.lock").symlink_to(precious)
    with pytest.raises(OptionError, match="--shard-uds-path"), claim_sockets(f"{tmp_path}/shard", 1):
        pass
    assert not precious.exists()


def test_a_link_in_place_of_a_socket_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/elsewhere")
        (tmp_path / "shard-0").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OptionError, match="is not a socket"), claim_sockets(f"{tmp_path}/shard", 1):
            pass


def test_healthy_means_status_200(free_port: int) -> None:
    statuses = [b"503 Service Unavailable", b"200 OK"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + statuses.pop(0) + b"\r\n\r\n")
        writer.close()

    async def ask() -> list[bool]:
        before = await is_healthy("0.0.0.0", free_port)
        async with await asyncio.start_server(answer, "127.0.0.1", free_port):
            return [before, await is_healthy("0.0.0.0", free_port), await is_healthy("0.0.0.0", free_port)]

    assert asyncio.run(ask()) == [False, False, True]


def test_urls_are_reachable_and_put_ipv6_in_brackets() -> None:
    assert browser_url("10.0.0.1", 80) == "http://10.0.0.1:80"
    assert browser_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert browser_url("::", 80) == "http://[::1]:80"
