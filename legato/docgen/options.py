"""docs/launcher.md, written from the table of options: `legato options > docs/launcher.md`."""

from __future__ import annotations

from legato.common.option import Option, groups, table
from legato.common.options import PROGRAMS, LauncherOptions
from legato.common.program import metavar, shown_default

INTRODUCTION = """\
# Options of text-generation-launcher

<!-- Written by `legato options > docs/launcher.md`. Edit legato/common/options.py instead. -->

Every option is a flag and an environment variable. The flag takes precedence; an empty variable counts as unset. Flags
without a value take `true` or `false` (or `1` or `0`) as a variable. Lists are separated by commas.

The launcher forwards options to the router and the model server, as the last column says. There,
`--model-id` is `--tokenizer-name` for the router and the first argument for the server.

Options for features that this version does not have are accepted by the parser and refused with an error that names
the feature.

| exit code | meaning |
|---|---|
| 0 | stopped by SIGINT, SIGTERM or SIGHUP after running requests had finished |
| 1 | an error: one line on stderr says which flag, file or process and what to do |
| 2 | invalid command line |
| 130 | interrupted a second time, or before anything ran |
"""


def reference_page() -> str:
    """The whole page, in Markdown."""
    takers = {program: {option.name for option in table(options)} for program, options in PROGRAMS.items()}
    sections = [INTRODUCTION]
    for heading, options in groups(LauncherOptions).items():
        rows = [_row(option, [name for name in takers if option.name in takers[name]]) for option in options]
        sections.append(
            f"## {heading}\n\n| flag | variable | default | meaning | also taken by |\n|---|---|---|---|---|"
        )
        sections[-1] += "\n" + "\n".join(rows) + "\n"
    return "\n".join(sections)


def _row(option: Option, programs: list[str]) -> str:
    flags = [f"`--{option.flag}`"] + [f"`-{option.short}`"] * bool(option.short)
    if option.alias:
        flags.append(f"`--{option.alias}`")
    if option.kind is bool and option.default:
        flags.append(f"`--no-{option.flag}`")
    value = "" if option.kind is bool else " " + metavar(option).replace("|", "\\|")
    cells = [
        ", ".join(flags) + value,
        f"`{option.env}`" if option.env else "",
        f"`{default}`" if (default := shown_default(option)) else "",
        option.long_help,
        ", ".join(name for name in programs if name != "launcher"),
    ]
    return "| " + " | ".join(cells) + " |"
