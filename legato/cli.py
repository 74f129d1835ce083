"""legato: all commands in one. The modules of a subcommand are imported when it runs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import cast

import click

from legato.common.program import run_program, with_version

# Programs that are also subcommands: name -> (module, command).
PROGRAMS = {
    "serve": ("legato.launcher.cli", "COMMAND"),
    "bench": ("legato.benchmark.commands", "bench"),
    "plan": ("legato.plan.cli", "COMMAND"),
}


class _Group(click.Group):
    """The commands below and the programs above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*PROGRAMS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in PROGRAMS:
            return super().get_command(ctx, name)
        module, attribute = PROGRAMS[name]
        return cast(click.Command, getattr(import_module(module), attribute))


@with_version
@click.group("legato", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def legato() -> None:
    """A text-generation server in Python."""


@legato.command()
def env() -> None:
    """Print versions, platform and GPUs, for bug reports."""
    from legato.launcher.environment import describe

    click.echo(describe())


@legato.command()
def options() -> None:
    """Print the reference page of the options, in Markdown."""
    from legato.docgen.options import reference_page

    click.echo(reference_page(), nl=False)


@legato.command()
def api() -> None:
    """Print the reference page of the HTTP API, in Markdown."""
    from legato.docgen.api import reference_page

    click.echo(reference_page(), nl=False)


@legato.command()
def models() -> None:
    """Print the reference page of the models, in Markdown."""
    from legato.models.catalogue import reference_page

    click.echo(reference_page(), nl=False)


def main() -> None:
    sys.exit(run_program(legato))


if __name__ == "__main__":
    main()
