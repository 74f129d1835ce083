"""The `legato` command. The modules of a subcommand are imported when it runs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, cast

import click

from legato.common.program import run_program, with_version

SETTINGS = {"help_option_names": ["-h", "--help"]}


class _Group(click.Group):
    """A group that also has `programs`: modules with a `COMMAND`, imported when they are used."""

    def __init__(self, *args: Any, programs: dict[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, context_settings=SETTINGS)
        self._programs = programs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._programs, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._programs:
            return super().get_command(ctx, name)
        return cast(click.Command, import_module(self._programs[name]).COMMAND)


COMMANDS = {
    "serve": "legato.launcher.cli",
    "plan": "legato.plan.cli",
    "doctor": "legato.doctor.cli",
    "route": "legato.balancer.cli",
    "ray": "legato.ray.cli",
}


@with_version
@click.group("legato", cls=_Group, programs=COMMANDS)
def legato() -> None:
    """A text-generation server in Python."""


PROGRAMS = {
    "engine": "legato.benchmark.engine.cli",
    "serve": "legato.benchmark.serve.cli",
    "cpu": "legato.benchmark.cpu.cli",
}
bench = _Group("bench", programs=PROGRAMS, help="Benchmarks.")
legato.add_command(bench)


@legato.command()
def env() -> None:
    """Print versions, platform and GPUs, for bug reports."""
    from legato.launcher.environment import describe

    click.echo(describe())


@legato.command()
def options() -> None:
    """Print the reference of the options, in Markdown."""
    from legato.docgen.options import reference_page

    click.echo(reference_page(), nl=False)


@legato.command()
def api() -> None:
    """Print the reference of the HTTP API, in Markdown."""
    from legato.docgen.api import reference_page

    click.echo(reference_page(), nl=False)


@legato.command()
def models() -> None:
    """Print the reference of the models, in Markdown."""
    from legato.docgen.models import reference_page

    click.echo(reference_page(), nl=False)


@legato.command()
@click.option("--dashboard", is_flag=True, help="Print the Grafana dashboard instead.")
def metrics(dashboard: bool) -> None:
    """Print the reference of the metrics, in Markdown."""
    from legato.docgen import metrics as page

    click.echo(page.dashboard() if dashboard else page.reference_page(), nl=False)


def router() -> None:
    """`text-generation-router`. `print-schema` is about the HTTP API, which the router's process never imports."""
    if sys.argv[1:] and "print-schema" in (sys.argv[1], sys.argv[-1]):
        from legato.docgen.api import schema

        click.echo(schema())
        sys.exit(0)
    import_module("legato.router.cli").main()


def main() -> None:
    sys.exit(run_program(legato))


if __name__ == "__main__":
    main()
