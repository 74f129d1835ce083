"""Compiles the C library: `python legato/cpu/build.py`, called by `make install`, `make setup` and the wheel's build.

One plain shared library without Python's or torch's ABI. The kernels are compiled once for each instruction set of the
processor family; which of them runs is decided when the library is loaded. Needs nothing of the package, so that it
runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "src"
LIBRARY = FOLDER / "legato_cpu.so"

FLAGS = ["-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Otherwise a function that is nowhere would be missed only when the library is loaded.
FLAGS += ["-Werror=implicit-function-declaration"]
# Sums must not depend on what the compiler contracts: where a multiply-add is wanted, the kernels say so.
FLAGS += ["-fno-math-errno", "-ffp-contract=off"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
# Suffix of the kernel table -> flags.
X86 = {
    "plain": [],
    "avx2": [*AVX2, "-O3"],
    "avxvnni": [*AVX2, "-mavxvnni", "-O3"],
    "avx512": [*AVX2, *AVX512, "-O3"],
    "amx": [*AVX2, *AVX512, "-mamx-tile", "-mamx-int8", "-O3"],
}
ARM = {"plain": ["-O3"], "neon": ["-O3", "-march=armv8.2-a+dotprod"]}
OTHERS: dict[str, list[str]] = {"plain": ["-O3"]}
MACHINES = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}


def build() -> str:
    """Build the library unless it is of these sources. Returns what was done or why nothing could be."""
    if is_current():
        return f"{LIBRARY} is up to date"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        return "no C compiler found: on a CPU the server will use torch's products, which are slower"
    try:
        with tempfile.TemporaryDirectory() as folder:
            _compile(compiler, Path(folder))
    except (subprocess.CalledProcessError, OSError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        lines = (reason or "").strip().splitlines()[:5]
        return "\n".join([f"{compiler} failed; on a CPU the server will use torch's products", *lines])
    return f"built {LIBRARY} with {compiler}"


def is_current() -> bool:
    """Whether the library can be loaded on this machine and was built from these sources, whatever times files have:
    copies and archives keep those of the original."""
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < Path(__file__).stat().st_mtime:
        return False
    try:
        sources = ctypes.CDLL(str(LIBRARY)).legato_sources
    except (OSError, AttributeError):
        return False
    sources.restype = ctypes.c_char_p
    built_from: bytes = sources()
    return built_from.decode() == sources_digest()


def sources_digest() -> str | None:
    """What the library was built from, or None if the sources were not installed with it."""
    if not SOURCES.is_dir():
        return None
    return hashlib.sha256(b"".join(source.read_bytes() for source in _sources())).hexdigest()


def _sources() -> list[Path]:
    return sorted(source for source in SOURCES.iterdir() if source.suffix in (".c", ".h"))


def _compile(compiler: str, folder: Path) -> None:
    known = MACHINES.get(platform.machine(), OTHERS)
    # Plain C needs no flag: a compiler that fails to compile it says why.
    sets = {suffix: flags for suffix, flags in known.items() if suffix == "plain" or _accepts(compiler, flags, folder)}
    has = [f"-DHAS_{suffix.upper()}" for suffix in sets]
    jobs = [(f"kernels_{suffix}", "kernels.c", [*flags, f"-DSUFFIX={suffix}"]) for suffix, flags in sets.items()]
    has.append(f'-DSOURCES_DIGEST="{sources_digest()}"')
    jobs += [(name, f"{name}.c", has) for name in ("model", "pack", "pool")]

    def compiled(job: tuple[str, str, list[str]]) -> str:
        name, source, flags = job
        _run([compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", f"{folder}/{name}.o"])
        return f"{folder}/{name}.o"

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compiled, jobs))
    # Into place in one go: a server that has the old one loaded keeps it.
    made = LIBRARY.with_suffix(".new")
    _run([compiler, "-shared", "-o", str(made), *objects, "-lm", "-lpthread"])
    os.replace(made, LIBRARY)


def _accepts(compiler: str, flags: list[str], folder: Path) -> bool:
    """Whether the compiler knows these instruction sets."""
    empty = folder / "empty.c"
    empty.write_text("int legato_empty;\n")
    command = [compiler, *flags, "-Werror", "-c", str(empty), "-o", f"{folder}/empty.o"]
    return subprocess.run(command, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    print(build(), file=sys.stderr)
