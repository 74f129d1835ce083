"""Command line and environment of each process. Pure functions; nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from legato.cluster.layout import RankLayout, link_port
from legato.cluster.relay import RelayOptions
from legato.common.options import DownloadOptions, LauncherOptions, RouterOptions, ServerOptions
from legato.common.program import forward, secrets, variables
from legato.common.tgi_variables import without_idle
from legato.launcher.nodes import Assembly
from legato.launcher.processes import ProcessCommand
from legato.modelfiles.files import needs_conversion

# The name of the process that stands for shards on other machines.
RELAY = "relay"
# Makes glibc request 2 MB pages (madvise). A decode step on a CPU reads all weights once, and hardware prefetchers stop
# at the end of every 4 KB page. glibc reads this variable only when a process starts.
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


@dataclass(frozen=True)
class LaunchPlan:
    download: ProcessCommand | None
    shards: list[ProcessCommand]
    router: ProcessCommand


def make_plan(
    options: LauncherOptions, sockets: list[str], environ: Mapping[str, str], layout: RankLayout | None = None
) -> LaunchPlan:
    """The processes of this machine for these options. Without a `layout` there is one shard per socket, and all of
    them are here."""
    layout = RankLayout(1, len(sockets)) if layout is None else layout
    # Children always log JSON, which keeps level and fields until the launcher formats them.
    options = replace(options, json_output=True)
    # Options are passed as arguments: a variable that a flag overrides must not reach a child.
    inherited = without_idle({name: value for name, value in environ.items() if name not in variables(LauncherOptions)})
    inherited |= {"PYTHONUNBUFFERED": "1"}
    return LaunchPlan(
        download=None if _is_complete(options) else _download(options, inherited),
        shards=[_shard(options, rank, layout, inherited) for rank in layout.ranks_of(options.node_rank)],
        router=_router(options, sockets[0], inherited),
    )


def _is_complete(options: LauncherOptions) -> bool:
    """Local, and in a format that the server reads; it checks the files itself."""
    folder = Path(options.model_id) if options.model_id else None
    return folder is not None and folder.exists() and not needs_conversion(folder)


def _download(options: LauncherOptions, environ: dict[str, str]) -> ProcessCommand:
    words = [*_program("text-generation-server", "legato.server.cli"), "download-weights"]
    return ProcessCommand("download", words + forward(options, DownloadOptions), environ, shows_stderr=True)


def _shard(options: LauncherOptions, rank: int, layout: RankLayout, environ: dict[str, str]) -> ProcessCommand:
    words = [*_program("text-generation-server", "legato.server.cli"), "serve"]
    words += [*forward(options, ServerOptions), f"--uds-path={options.shard_uds_path}"]
    # Read by torch.distributed.
    ranks = {
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.world_size),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
    }
    if layout.needs_links:
        ranks |= secrets(options, ServerOptions)
    return ProcessCommand(f"shard-{rank}", words, _with_huge_pages(environ) | ranks, beats=True)


def shard_group(
    plan: LaunchPlan, options: LauncherOptions, layout: RankLayout, assembly: Assembly
) -> list[ProcessCommand]:
    """The shards of this machine for one start of all of them, and on the first machine what stands for the others."""
    words = [f"--node-addrs={','.join(assembly.addresses)}", f"--group-id={assembly.group}"]
    commands = [replace(shard, words=[*shard.words, *words]) for shard in plan.shards]
    remote = [rank for rank in range(layout.world_size) if layout.node(rank) > 0]
    if options.node_rank or not remote:
        return commands
    named = [
        f"{rank}={assembly.addresses[layout.node(rank)]}={link_port(options.master_port, rank)}" for rank in remote
    ]
    relay = RelayOptions(
        logger_level=options.logger_level,
        json_output=True,
        uds_path=options.shard_uds_path,
        remote=tuple(named),
        source=assembly.addresses[0],
        group_id=assembly.group,
        cluster_certfile=options.cluster_certfile,
        cluster_keyfile=options.cluster_keyfile,
        cluster_cafile=options.cluster_cafile,
    )
    environ = plan.router.environ | secrets(options, RelayOptions)
    run = [sys.executable, "-m", "legato.cluster.relay", *forward(relay, RelayOptions)]
    return [*commands, ProcessCommand(RELAY, run, environ)]


def on_port(shards: list[ProcessCommand], port: int) -> list[ProcessCommand]:
    """The same shards with another port at which they find each other."""
    flag, environ = f"--master-port={port}", {"MASTER_PORT": str(port)}
    return [replace(shard, words=[*shard.words, flag], environ=shard.environ | environ) for shard in shards]


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
