"""What an option is, and how a class of them becomes a list. The options themselves are in `legato.common.options`.

A group is a frozen dataclass; its first docstring line is the heading in `--help` and in docs/launcher.md. A program
is a class that inherits the groups it takes, so that reading an option which a program does not have is a type error.
The annotation of a field is the type of its flag, its name is the flag (`max_best_of` is `--max-best-of` and
`MAX_BEST_OF`). `legato.common.program` turns a class into a command line.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """One line of the table."""

    help: str
    # Empty: derived from the field's name. env=None: no variable, because the name is too common.
    flag: str = ""
    env: str | None = ""
    short: str | None = None
    # An older spelling of the flag, with its variable. Giving both spellings is an error.
    alias: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    # A feature that is not there yet: every value but the default and those in `served` is refused.
    later: str | None = None
    served: tuple[object, ...] = ()
    # Why giving this option changes nothing. Worth a warning when somebody gives it.
    no_effect: str | None = None
    positional: bool = False
    # Not for the eyes of other users of the machine, who can read command lines: travels as a variable.
    secret: bool = False
    # Filled in from the field.
    name: str = ""
    kind: Any = str
    default: Any = None

    @property
    def long_help(self) -> str:
        """The help sentence, with what this version makes of the option."""
        if self.later is not None:
            return f"{self.help} Not available in this version."
        if self.no_effect is not None:
            return f"{self.help} No effect: {self.no_effect}."
        return self.help


def option(default: T, help: str, **settings: Any) -> T:
    """A field of a group. Typed as its value, so that mypy compares the default with the annotation."""
    return field(default=default, metadata={"option": Option(help, **settings)})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every program's options have in common: which of them somebody gave, by flag or variable."""

    # How this program spells an option differently from the table.
    changes: ClassVar[dict[str, dict[str, Any]]] = {}

    given: frozenset[str] = frozenset()

    @property
    def warnings(self) -> list[str]:
        """One line for each given option that changes nothing."""
        idle = [option for option in table(type(self)) if option.no_effect and option.name in self.given]
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
    """The option with what its field says: name, flag, variable, type and default."""
    option: Option = column.metadata["option"]
    option = replace(option, name=column.name, kind=kind, default=column.default, **changes)
    env = column.name.upper() if option.env == "" else option.env
    return replace(option, flag=option.flag or column.name.replace("_", "-"), env=env)
