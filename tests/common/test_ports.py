"""Free ports are free, in a row, and none that the kernel gives to outgoing connections."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from legato.common import sockets
from legato.common.sockets import free_port


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        assert listener.getsockname()[1] < sockets._first_outgoing_port()


def test_ports_in_a_row_are_all_free() -> None:
    first = free_port(count=20)
    with ExitStack() as listeners:
        for port in range(first, first + 20):
            listeners.enter_context(socket.create_server(("127.0.0.1", port)))


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither alone nor inside a row, also if only another address of this machine uses it."""
    first = free_port("0.0.0.0", 4)
    chosen = [each - sockets._LOWEST_PORT for each in (first - 2, first - 1, first, first + 1)]
    monkeypatch.setattr(sockets.secrets, "randbelow", lambda count: chosen.pop(0))
    with socket.create_server(("127.0.0.2", first)):
        assert free_port("0.0.0.0", 3) == first + 1


def test_without_a_range_of_its_own_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sockets, "_OUTGOING_PORTS", tmp_path / "range")
    assert sockets._first_outgoing_port() > sockets._HIGHEST_PORT
    sockets._OUTGOING_PORTS.write_text("1024\t65535\n")
    first = free_port(count=3)
    with socket.create_server(("127.0.0.1", first + 2)):
        pass


def test_ports_that_are_all_in_use_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_are_free", lambda *_: False)
    with pytest.raises(OSError, match="no 2 free ports in a row"):
        free_port(count=2)
