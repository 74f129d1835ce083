"""What the launcher starts: the command line and the environment of each program. Pure; nothing runs here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from legato.common.options import DownloadOptions, LauncherOptions, RouterOptions, ServerOptions
from legato.common.program import forward, secrets, variables
from legato.launcher.processes import Command

# Asks glibc for pages of 2 MB where the system grants them on request. A decode step on a CPU reads all weights once,
# and in pages of 4 KB the prefetchers stop at the end of each. A process can be told so only before it starts.
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


@dataclass(frozen=True)
class Plan:
    download: Command | None
    shards: list[Command]
    router: Command


def make_plan(options: LauncherOptions, sockets: list[str], environ: Mapping[str, str]) -> Plan:
    """The programs that serve these options, one shard for each socket."""
    # Children write JSON, whatever we write: it keeps levels and fields apart until they are shown.
    options = replace(options, json_output=True)
    # All our options travel as arguments. A variable that we have overruled must not reach a child behind our back.
    inherited = {name: value for name, value in environ.items() if name not in variables(LauncherOptions)}
    inherited |= {"PYTHONUNBUFFERED": "1"}
    return Plan(
        # Whether the files of a local model are good is for the server to find out.
        download=None if options.model_id and Path(options.model_id).exists() else _download(options, inherited),
        shards=[_shard(options, rank, len(sockets), inherited) for rank in range(len(sockets))],
        router=_router(options, sockets[0], inherited),
    )


def _download(options: LauncherOptions, environ: dict[str, str]) -> Command:
    words = [*_program("text-generation-server", "legato.server.cli"), "download-weights"]
    return Command("download", words + forward(options, DownloadOptions), environ, shows_stderr=True)


def _shard(options: LauncherOptions, rank: int, world_size: int, environ: dict[str, str]) -> Command:
    words = [*_program("text-generation-server", "legato.server.cli"), "serve"]
    words += [*forward(options, ServerOptions), f"--uds-path={options.shard_uds_path}"]
    # The names by which torch.distributed finds its peers.
    ranks = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
    }
    return Command(f"shard-{rank}", words, _with_huge_pages(environ) | ranks)


def _with_huge_pages(environ: dict[str, str]) -> dict[str, str]:
    """Unless somebody has decided otherwise."""
    tunables = environ.get(TUNABLES, "")
    if HUGE_PAGES in tunables:
        return environ
    return environ | {TUNABLES: ":".join(filter(None, [tunables, f"{HUGE_PAGES}=1"]))}


def _router(options: LauncherOptions, socket: str, environ: dict[str, str]) -> Command:
    words = [*_program("text-generation-router", "legato.router.cli"), *forward(options, RouterOptions)]
    return Command("router", [*words, f"--master-shard-uds-path={socket}"], environ | secrets(options, RouterOptions))


def _program(script: str, module: str) -> list[str]:
    """How to run one of our programs: the script beside our interpreter, else its module. PATH plays no part."""
    path = Path(sys.executable).parent / script
    return [str(path)] if path.is_file() else [sys.executable, "-m", module]
