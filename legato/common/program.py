"""Command lines from option classes, and exit codes.

Exit codes: 0 success, 1 error with one line on stderr, 2 invalid command line, 3 restarted processes of its own too
often, 4 the device failed, 130 interrupted.
"""

from __future__ import annotations

import math
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click
from click.core import ParameterSource

from legato import __version__
from legato.common.errors import LegatoError, OptionError
from legato.common.exits import discard, open_standard_streams, report
from legato.common.option import Option, Options, groups, table
from legato.common.tgi_variables import adopt_token

P = TypeVar("P", bound=Options)
C = TypeVar("C", bound=click.Command)


def command(program: type[P], run: Callable[[P], int | None], name: str, summary: str) -> click.Command:
    """A command that parses the options of `program` from flags and variables and calls `run` with them."""

    def callback(**_: object) -> int | None:
        return run(_collect(program, click.get_current_context()))

    params = [param for option in table(program) for param in _params(option)]
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    cmd = _Command(name, callback=callback, params=params, help=summary, context_settings=settings)
    cmd.program = program
    return with_version(cmd)


def with_version(cmd: C) -> C:
    """The same command with `-V` and `--version`."""
    return click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")(cmd)


def run_program(cmd: click.Command, args: Sequence[str] | None = None, name: str | None = None) -> int:
    """Run a command and return its exit code. User errors end in one line on stderr, never in a traceback."""
    open_standard_streams()
    adopt_token(os.environ)
    try:
        code = cmd.main(args, prog_name=name or cmd.name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except LegatoError as error:
        report(f"error: {error}")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        discard(sys.stdout)
        return 1
    return code if isinstance(code, int) else 0


def forward(options: Options, program: type[Options]) -> list[str]:
    """Arguments that pass `options` on to `program`, as far as it has them.

    Defaults are omitted, so `program` must not see the environment variables that `options` was parsed from.
    """
    names = {column.name for column in fields(options)}
    positional, flags = [], []
    for option in table(program):
        if option.name not in names or option.no_effect or option.secret:
            continue
        value = getattr(options, option.name)
        if value == option.default:
            continue
        if option.positional:
            positional.append(str(value))
        elif option.kind is bool:
            flags.append(f"--{option.flag}" if value else f"--no-{option.flag}")
        else:
            flags.append(f"--{option.flag}={_spell(value)}")
    return positional + flags


def secrets(options: Options, program: type[Options]) -> dict[str, str]:
    """The secret options, which `forward` omits, as environment variables."""
    hidden = [option for option in table(program) if option.secret and option.env]
    values = {option.env: getattr(options, option.name, option.default) for option in hidden if option.env}
    return {name: _spell(value) for name, value in values.items() if value}


def variables(program: type[Options]) -> set[str]:
    """The environment variables of a program's options."""
    names = {option.env for option in table(program) if option.env}
    return names | {_variable(option.alias) for option in table(program) if option.alias}


class _Command(click.Command):
    """A command whose help shows options by group."""

    program: type[Options]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, options in groups(self.program).items():
            with formatter.section(heading):
                formatter.write_dl([(synopsis(option), _described(option)) for option in options])
        about = [param.get_help_record(ctx) for param in self.get_params(ctx) if param.is_eager]
        with formatter.section("About"):
            formatter.write_dl([record for record in about if record])


def synopsis(option: Option) -> str:
    """`-p, --port INTEGER`"""
    if option.positional:
        return f"[{option.name.upper()}]"
    flag = f"--{option.flag}"
    if option.kind is bool:
        flag += f" / --no-{option.flag}" if option.default else ""
    else:
        flag += f" {metavar(option)}"
    return f"-{option.short}, {flag}" if option.short else flag


def metavar(option: Option) -> str:
    """Placeholder for the value: the choices, or its type."""
    kind = _bare(option.kind)
    if get_origin(kind) is Literal:
        return "[" + "|".join(get_args(kind)) + "]"
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    word = {bool: "[true|false]", int: "INTEGER", float: "NUMBER", str: "TEXT"}[kind]
    return f"{word},..." if get_origin(_bare(option.kind)) is tuple else word


def shown_default(option: Option) -> str:
    """The default as text; empty if there is none."""
    if option.default in (None, False, ()):
        return ""
    return _spell(option.default)


def _described(option: Option) -> str:
    notes = [f"env: {option.env}"] if option.env else []
    if default := shown_default(option):
        notes.append(f"default: {default}")
    if option.alias:
        notes.append(f"also: --{option.alias}")
    return option.long_help + "".join(f" [{note}]" for note in notes)


def _params(option: Option) -> list[click.Parameter]:
    """The click parameters of an option. An alias is a parameter of its own, to detect that both are set."""
    kind = _click_type(option)
    if option.positional:
        return [click.Argument([option.name], type=kind, required=False, envvar=option.env)]
    flag = f"--{option.flag}"
    names = [option.name, flag] + ([f"-{option.short}"] if option.short else [])
    if option.kind is bool and option.default:
        names = [option.name, f"{flag}/--no-{option.flag}"]
    settings: dict[str, Any] = {"type": kind, "default": option.default}
    if option.kind is bool:
        settings["is_flag"] = True
    elif get_origin(option.kind) is tuple:
        settings = {"type": kind, "multiple": True}
    params: list[click.Parameter] = [click.Option(names, envvar=option.env, **settings)]
    if option.alias:
        alias = [_alias_name(option.alias), f"--{option.alias}"]
        params.append(click.Option(alias, envvar=_variable(option.alias), **settings))
    return params


def _collect(program: type[P], ctx: click.Context) -> P:
    """The parsed options: aliases resolved, unavailable features refused."""
    values: dict[str, Any] = {}
    given: set[str] = set()
    for option in table(program):
        source = ctx.get_parameter_source(option.name)
        value = ctx.params[option.name]
        if option.alias and _is_given(ctx.get_parameter_source(_alias_name(option.alias))):
            if _is_given(source):
                raise OptionError(
                    f"--{option.alias} is a deprecated alias of --{option.flag}, and both are set: keep --{option.flag}"
                )
            source = ctx.get_parameter_source(_alias_name(option.alias))
            value = ctx.params[_alias_name(option.alias)]
        if isinstance(value, tuple):
            value = tuple(item for items in value for item in items)
        if _is_given(source):
            given.add(option.name)
        if option.later and value != option.default and value not in option.served:
            origin = f" (set by {option.env})" if source is ParameterSource.ENVIRONMENT else ""
            raise OptionError(f"--{option.flag}{origin}: {option.later} is not available in this version of Legato")
        values[option.name] = value
    return program(given=frozenset(given), **values)


def _is_given(source: ParameterSource | None) -> bool:
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def _alias_name(alias: str) -> str:
    return alias.replace("-", "_")


def _variable(flag: str) -> str:
    return _alias_name(flag).upper()


def _spell(value: object) -> str:
    """A value as an argument."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _bare(kind: Any) -> Any:
    """The type without `| None`."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (arg for arg in get_args(kind) if arg is not types.NoneType)
    return kind


def _click_type(option: Option) -> Any:
    """A click type or a function that converts an argument to the option's type."""
    kind = _bare(option.kind)
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if get_origin(kind) is tuple:
        return _comma_list(get_args(kind)[0])
    if kind is int:
        # All integers are counts, sizes or ports: never negative.
        return click.IntRange(int(option.minimum or 0), None if option.maximum is None else int(option.maximum))
    if kind is float:
        return _Number(option.minimum, option.maximum)
    return click.BOOL if kind is bool else click.STRING


class _Number(click.FloatRange):
    """Every comparison with NaN is false, so it is within all limits and fails later, where nobody names the flag."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def _comma_list(item: type[int] | type[str]) -> Callable[[str], tuple[int | str, ...]]:
    """Converts `1,2,4` to a tuple. If the flag is repeated, `_collect` concatenates the tuples."""

    def convert(value: str) -> tuple[int | str, ...]:
        try:
            return tuple(item(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a comma-separated list of integers") from None

    return convert
