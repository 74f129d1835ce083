"""Another user of the machine binds the path of a shard before the shard does, or connects to a shard."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from legato.common.errors import EndpointInUse
from legato.common.sockets import check_peer, is_own_socket
from legato.server.fake.service import FakeService
from legato.server.listening import listen

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder as /tmp is: everybody may create files."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_nobody(act: Callable[[], None]) -> Iterator[int]:
    """A process of another user that does something and then waits. Yields its exit code if it has ended, else -1."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
            os.write(write, b"0")
            signal.pause()
        except PermissionError:
            os.write(write, b"1")
        finally:
            os._exit(0)
    os.close(write)
    try:
        yield int(os.read(read, 1))
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@needs_root
def test_the_shard_of_another_user_is_noticed_before_anything_is_sent_to_it(public: Path) -> None:
    path = str(public / "text-generation-server-0")
    server = socket.socket(socket.AF_UNIX)

    def pose() -> None:
        server.bind(path)
        os.chmod(path, 0o777)
        server.listen()

    with as_nobody(pose), server, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        assert not is_own_socket(path)
        with pytest.raises(EndpointInUse, match=f"uid {NOBODY}.*--flag"):
            check_peer(path, "--flag")


@needs_root
def test_a_connection_that_was_made_before_the_file_was_replaced_is_noticed(public: Path) -> None:
    path = str(public / "shard-0")
    server = socket.socket(socket.AF_UNIX)

    def pose() -> None:
        server.bind(path)
        os.chmod(path, 0o777)
        server.listen()

    with as_nobody(pose), server, socket.socket(socket.AF_UNIX) as connection, socket.socket(socket.AF_UNIX) as ours:
        connection.connect(path)
        os.unlink(path)
        ours.bind(path)
        assert is_own_socket(path)
        with pytest.raises(EndpointInUse, match=f"uid {NOBODY}"):
            check_peer(path, "--flag")


def test_our_own_shard_is_trusted(tmp_path: Path) -> None:
    path = str(tmp_path / "shard-0")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as connection:
        server.bind(path)
        server.listen()
        connection.connect(path)
        assert is_own_socket(path)
        check_peer(path, "--flag")


@needs_root
def test_another_user_cannot_connect_to_a_shard(public: Path) -> None:
    """The kernel compares the user with the owner of the socket, which has mode 0600 from its first moment."""
    path = str(public / "shard-0")

    def intrude() -> None:
        socket.socket(socket.AF_UNIX).connect(path)

    async def serve() -> int:
        service = FakeService.__new__(FakeService)
        server = await listen(service, path)
        try:
            with as_nobody(intrude) as refused:
                return refused
        finally:
            await server.stop(None)

    assert asyncio.run(serve()) == 1
