"""The subcommands of `legato bench`."""

from __future__ import annotations

from legato.benchmark.engine.cli import bench
from legato.benchmark.serve.cli import COMMAND

bench.add_command(COMMAND)
