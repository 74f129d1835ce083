"""How options are declared. The options themselves are in `legato.common.options`.

A group is a frozen dataclass whose docstring is the heading in `--help` and in docs/launcher.md. A program is a class
that inherits its groups, so that reading an option that a program does not have is a type error. A field's name is the
flag (`max_best_of` is `--max-best-of` and `MAX_BEST_OF`), its annotation the type of the value.
`legato.common.program` turns a class into a command line.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """Everything about one option."""

    help: str
    # Empty: derived from the field's name. env=None: no environment variable.
    flag: str = ""
    env: str | None = ""
    short: str | None = None
    # An older spelling of the flag, with its variable. Giving both spellings is an error.
    alias: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    # A feature that is not available yet: values other than the default and those in `served` are refused.
    later: str | None = None
    served: tuple[object, ...] = ()
    # Why setting this option has no effect; logged as a warning if it is set, unless it asks for what is always so.
    no_effect: str | None = None
    always_so: bool = False
    positional: bool = False
    # Passed on as an environment variable, because other users can read command lines.
    secret: bool = False
    # Set from the field.
    name: str = ""
    kind: Any = str
    default: Any = None

    @property
    def long_help(self) -> str:
        """The help text and whether the option has an effect in this version."""
        if self.later is not None:
            return f"{self.help} Not available in this version."
        if self.no_effect is not None:
            return f"{self.help} No effect: {self.no_effect}."
        return self.help


def option(default: T, help: str, **settings: Any) -> T:
    """A field of a group. Typed as its value, so that mypy checks the default against the annotation."""
    return field(default=default, metadata={"option": Option(help, **settings)})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all option classes. `given` names the options that were set by flag or variable."""

    # Option name -> attributes that differ in this program.
    changes: ClassVar[dict[str, dict[str, Any]]] = {}

    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Groups check their options here, and let the next group do the same."""

    @property
    def warnings(self) -> list[str]:
        """One line for each option that was set and does not do what it asks for."""
        given = [option for option in table(type(self)) if option.name in self.given]
        idle = [option for option in given if option.no_effect and not option.always_so]
        return [f"--{option.flag} has no effect: {option.no_effect}" for option in idle]


def groups(program: type[Options]) -> dict[str, list[Option]]:
    """Heading -> options, in the order of the program's groups, its own options last."""
    hints = get_type_hints(program)
    columns = {column.name: column for column in fields(program) if "option" in column.metadata}
    found: dict[str, list[Option]] = {}
    for group in [*program.__mro__[1:], program]:
        names = [name for name in getattr(group, "__annotations__", ()) if name in columns]
        if names:
            heading = (group.__doc__ or "").strip()
            found[heading] = [_complete(columns[name], hints[name], program.changes.get(name, {})) for name in names]
    return found


def table(program: type[Options]) -> list[Option]:
    """Every option of a program."""
    return [option for options in groups(program).values() for option in options]


def _complete(column: Field[Any], kind: Any, changes: dict[str, Any]) -> Option:
    """The option with name, flag, variable, type and default from its field."""
    option: Option = column.metadata["option"]
    option = replace(option, name=column.name, kind=kind, default=column.default, **changes)
    env = column.name.upper() if option.env == "" else option.env
    return replace(option, flag=option.flag or column.name.replace("_", "-"), env=env)
