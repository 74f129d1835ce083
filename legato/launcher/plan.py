"""Command line and environment of each process. Pure functions; nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from legato.common.options import DownloadOptions, LauncherOptions, RouterOptions, ServerOptions
from legato.common.program import forward, secrets, variables
from legato.common.tgi_variables import without_idle
from legato.launcher.processes import ProcessCommand
from legato.modelfiles.files import needs_conversion

# Makes glibc request 2 MB pages (madvise). A decode step on a CPU reads all weights once, and hardware prefetchers stop
# at the end of every 4 KB page. glibc reads this variable only when a process starts.
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


@dataclass(frozen=True)
class LaunchPlan:
    download: ProcessCommand | None
    shards: list[ProcessCommand]
    router: ProcessCommand


def make_plan(options: LauncherOptions, sockets: list[str], environ: Mapping[str, str]) -> LaunchPlan:
    """The processes for these options, one shard per socket."""
    # Children always log JSON, which keeps level and fields until the launcher formats them.
    options = replace(options, json_output=True)
    # Options are passed as arguments: a variable that a flag overrides must not reach a child.
    inherited = without_idle({name: value for name, value in environ.items() if name not in variables(LauncherOptions)})
    inherited |= {"PYTHONUNBUFFERED": "1"}
    return LaunchPlan(
        download=None if _is_complete(options) else _download(options, inherited),
        shards=[_shard(options, rank, len(sockets), inherited) for rank in range(len(sockets))],
        router=_router(options, sockets[0], inherited),
    )


def _is_complete(options: LauncherOptions) -> bool:
    """Local, and in a format that the server reads; it checks the files itself."""
    folder = Path(options.model_id) if options.model_id else None
    return folder is not None and folder.exists() and not needs_conversion(folder)


def _download(options: LauncherOptions, environ: dict[str, str]) -> ProcessCommand:
    words = [*_program("text-generation-server", "legato.server.cli"), "download-weights"]
    return ProcessCommand("download", words + forward(options, DownloadOptions), environ, shows_stderr=True)


def _shard(options: LauncherOptions, rank: int, world_size: int, environ: dict[str, str]) -> ProcessCommand:
    words = [*_program("text-generation-server", "legato.server.cli"), "serve"]
    words += [*forward(options, ServerOptions), f"--uds-path={options.shard_uds_path}"]
    # Read by torch.distributed.
    ranks = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
    }
    return ProcessCommand(f"shard-{rank}", words, _with_huge_pages(environ) | ranks, beats=True, loads=True)


def _with_huge_pages(environ: dict[str, str]) -> dict[str, str]:
    """Unless the variable already sets them."""
    tunables = environ.get(TUNABLES, "")
    if HUGE_PAGES in tunables:
        return environ
    return environ | {TUNABLES: ":".join(filter(None, [tunables, f"{HUGE_PAGES}=1"]))}


def _router(options: LauncherOptions, socket: str, environ: dict[str, str]) -> ProcessCommand:
    words = [*_program("text-generation-router", "legato.router.cli"), *forward(options, RouterOptions)]
    words.append(f"--master-shard-uds-path={socket}")
    return ProcessCommand("router", words, environ | secrets(options, RouterOptions), beats=True)


def _program(script: str, module: str) -> list[str]:
    """The script next to our interpreter, or else its module. Independent of PATH."""
    path = Path(sys.executable).parent / script
    return [str(path)] if path.is_file() else [sys.executable, "-m", module]
