"""The subcommands of `legato bench`."""

from __future__ import annotations

from legato.benchmark.engine import bench
from legato.benchmark.serve import COMMAND

bench.add_command(COMMAND)
