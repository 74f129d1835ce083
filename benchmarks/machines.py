"""Several machines on this one, for benchmarks and tests of a model on several machines.

Loopback      machine i is 127.0.0.(i + 1): no privileges needed, the links cannot be slowed down or cut
Namespaces    each machine is a network namespace: links may be slow and lose packets, be cut and fall silent; needs
              root and `ip`
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import stop
from legato.common.sockets import free_port

START_SECONDS = 240.0
KEY = "benchmarks of several machines"


@dataclass(frozen=True)
class Machine:
    address: str  # that the others connect to
    http_address: str  # that this program connects to
    prefix: Sequence[str] = ()  # of commands that run there


@dataclass(frozen=True)
class Loopback:
    machines: list[Machine]


def loopback(count: int = 2) -> Loopback:
    return Loopback([Machine(f"127.0.0.{number + 1}", "127.0.0.1") for number in range(count)])


def missing_for_namespaces() -> str | None:
    """Why this machine cannot have network namespaces, if it cannot."""
    if shutil.which("ip") is None:
        return "`ip` is missing: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"lgt{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are not possible here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Namespaces:
    """Addresses are of 198.18.0.0/15, which is reserved for benchmarks. With a `delay` in seconds or a `loss` the
    machines are joined by `benchmarks/wire.py`, else by a bridge of the kernel."""

    def __init__(self, count: int = 2, delay: float = 0.0, loss: float = 0.0) -> None:
        self._name, self._net = f"lgt{secrets.token_hex(2)}", 2 * secrets.randbelow(100)
        self._count = count
        self._delay, self._loss = delay, loss
        self._wire: subprocess.Popen[bytes] | None = None
        self.machines = [
            Machine(f"198.18.{self._net}.{number + 1}", f"198.18.{self._net + 1}.1", ("ip", "netns", "exec", ns))
            for number, ns in enumerate(map(self._namespace, range(count)))
        ]

    def __enter__(self) -> Namespaces:
        try:
            for number in range(self._count):
                ip("netns", "add", self._namespace(number))
            if self._delay or self._loss:
                self._join_by_wire()
            else:
                self._join_by_bridge()
            for number, machine in enumerate(self.machines):
                ns = self._namespace(number)
                ip("-n", ns, "addr", "add", f"{machine.address}/24", "dev", "eth0")
                ip("-n", ns, "link", "set", "eth0", "up")
                ip("-n", ns, "link", "set", "lo", "up")
            # From here to the first machine, beside the links between machines.
            ip("link", "add", f"{self._name}h", "type", "veth", "peer", "name", "eth1", "netns", self._namespace(0))
            ip("addr", "add", f"198.18.{self._net + 1}.2/24", "dev", f"{self._name}h")
            ip("link", "set", f"{self._name}h", "up")
            ip("-n", self._namespace(0), "addr", "add", f"198.18.{self._net + 1}.1/24", "dev", "eth1")
            ip("-n", self._namespace(0), "link", "set", "eth1", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _join_by_bridge(self) -> None:
        ip("link", "add", f"{self._name}br", "type", "bridge")
        ip("link", "set", f"{self._name}br", "up")
        for number in range(self._count):
            outer = self._outer(number)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", self._namespace(number))
            ip("link", "set", outer, "master", f"{self._name}br", "up")

    def _join_by_wire(self) -> None:
        words = [f"--delay={self._delay}", f"--loss={self._loss}", *map(self._namespace, range(self._count))]
        self._wire = subprocess.Popen([sys.executable, "-m", "benchmarks.wire", *words], stdout=subprocess.PIPE)
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != b"ready\n":
            raise RuntimeError("the wire between the namespaces did not start")

    def __exit__(self, *_: object) -> None:
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        for number in range(self._count):
            ip("netns", "delete", self._namespace(number), check=False)
        for name in (f"{self._name}h", f"{self._name}br", *(self._outer(number) for number in range(self._count))):
            ip("link", "delete", name, check=False)

    def cut(self, number: int) -> None:
        """The cable is pulled: the machine's interface has no carrier."""
        ip("link", "set", self._outer(number), "down")

    def mend(self, number: int) -> None:
        ip("link", "set", self._outer(number), "up")

    def silence(self, number: int) -> None:
        """Packets from and to this machine go nowhere, and nobody is told."""
        for one, other in self._pairs(number):
            there = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
            ip("-n", self._namespace(one), "neigh", "replace", self.machines[other].address, "dev", "eth0", *there)

    def restore(self, number: int) -> None:
        for one, other in self._pairs(number):
            ip("-n", self._namespace(one), "neigh", "delete", self.machines[other].address, "dev", "eth0")

    def _pairs(self, number: int) -> list[tuple[int, int]]:
        others = [each for each in range(self._count) if each != number]
        return [(number, other) for other in others] + [(other, number) for other in others]

    def _namespace(self, number: int) -> str:
        return f"{self._name}n{number}"

    def _outer(self, number: int) -> str:
        return f"{self._name}v{number}"


def ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass
class ClusterServer:
    """One model on several machines: a launcher on each, with the same arguments."""

    machines: Sequence[Machine]
    folder: Path
    words: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    launchers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port, self.master_port = free_port(), free_port("0.0.0.0", 2 + 8 * len(self.machines))

    @property
    def url(self) -> str:
        return f"http://{self.machines[0].http_address}:{self.port}"

    def start(self, rank: int) -> None:
        machine = self.machines[rank]
        place = [
            f"--nnodes={len(self.machines)}", f"--node-rank={rank}", f"--master-addr={self.machines[0].address}",
            f"--node-addr={machine.address}", f"--master-port={self.master_port}", f"--port={self.port}",
            f"--hostname={self.machines[0].http_address}", f"--shard-uds-path={self.folder}/m{rank}-shard",
            "--prometheus-port=0", "--http-workers=1",
        ]  # fmt: skip
        words = [*machine.prefix, sys.executable, "-m", "legato.launcher.cli", *place, *self.words]
        environment = {**os.environ, "CLUSTER_KEY": KEY, **self.environment}
        with self.log(rank).open("ab") as log:
            # In a session of its own: `kill` ends all of it.
            self.launchers[rank] = subprocess.Popen(
                words, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def log(self, rank: int) -> Path:
        return self.folder / f"machine-{rank}.log"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def until_ready(self, timeout: float = START_SECONDS) -> float:
        """Seconds that it took."""
        started = time.monotonic()
        while not self.is_ready():
            ended = [rank for rank, launcher in self.launchers.items() if launcher.poll() is not None]
            if ended or time.monotonic() - started > timeout:
                logs = "\n".join(self.log(rank).read_text(errors="replace")[-2000:] for rank in self.launchers)
                raise RuntimeError(f"not ready after {timeout:g} s, ended: {ended}\n{logs}")
            time.sleep(0.05)
        return time.monotonic() - started

    def kill(self, rank: int) -> None:
        """The power fails: the launcher is killed, and its children with it."""
        launcher = self.launchers.pop(rank)
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()

    def stop(self) -> None:
        """The first machine ends the others."""
        for rank in sorted(self.launchers):
            stop(self.launchers[rank])
        self.launchers.clear()


@contextmanager
def cluster(
    machines: Sequence[Machine], folder: Path, *words: str, environment: dict[str, str] | None = None
) -> Iterator[ClusterServer]:
    """A server that is ready, and is stopped at the end."""
    server = ClusterServer(machines, folder, words, environment or {})
    try:
        for rank in range(len(machines)):
            server.start(rank)
        server.until_ready()
        yield server
    finally:
        server.stop()
