"""`text-generation-server`: serve a model on a unix socket, or fetch its files beforehand."""

from __future__ import annotations

import logging
import sys

import click

from legato.common.errors import OptionError
from legato.common.locate import locate
from legato.common.logging import setup
from legato.common.model_files import ModelFiles
from legato.common.options import DownloadOptions, ServerOptions
from legato.common.program import command, run_program
from legato.common.sockets import claim_socket

logger = logging.getLogger(__name__)


def serve(options: ServerOptions) -> None:
    setup(options.logger_level, options.json_output, "text-generation-server")
    for warning in options.warnings:
        logger.warning(warning)
    if options.rank >= options.world_size:
        raise OptionError(f"--rank ({options.rank}) must be less than --world-size ({options.world_size})")
    claim_socket(f"{options.uds_path}-{options.rank}", "--uds-path")
    files = ModelFiles.open(locate(options))
    files.config()
    if options.load_format == "auto":
        files.check_weights()
    from legato.server.serving import run  # brings in torch, which takes seconds: wrong flags and files end before

    run(files, options)


def download_weights(options: DownloadOptions) -> None:
    setup(options.logger_level, options.json_output, "text-generation-server")
    files = ModelFiles.open(locate(options))
    files.check_weights()
    logger.info("Weights are here", extra={"fields": {"path": str(files.path)}})


def main() -> None:
    group = click.Group("text-generation-server", help="The model server: one shard of one model.")
    group.add_command(command(ServerOptions, serve, "serve", "Serve a model on a unix socket."))
    group.add_command(
        command(DownloadOptions, download_weights, "download-weights", "Fetch a model's files and check them.")
    )
    sys.exit(run_program(group))


if __name__ == "__main__":
    main()
