"""The kernels for AMX on processors that have none: with its tiles in plain C (tiles.h), compared with AVX2."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from legato.cpu import build, packed
from legato.cpu.library import Library
from legato.models import host
from tests.cpu.conftest import built
from tests.cpu.test_forward import COMPARED, all_logits
from tests.cpu.test_packed import Same, compare_products

TILES = Path(__file__).with_name("tiles.h")
KERNELS: dict[str, list[str]] = {
    "avx512": [*build.X86["avx512"], "-include", str(TILES)],
    "avx2": build.X86["avx2"],
    "plain": [],
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The library, whose kernels for AVX-512 are those for AMX."""
    compiler = shutil.which("gcc")
    if compiler is None or built().choose(b"avx512-vnni") is None:
        pytest.skip("needs gcc and a processor with AVX-512 VNNI")
    built().choose(None)
    folder = tmp_path_factory.mktemp("amx")
    has = ["-DHAS_AVX512", "-DHAS_AVX2", f'-DSOURCES_DIGEST="{build.sources_digest()}"']
    jobs = [(f"kernels_{suffix}", "kernels", [*flags, f"-DSUFFIX={suffix}"]) for suffix, flags in KERNELS.items()]
    jobs += [(name, name, has) for name in ("model", "pack", "pool")]

    def compile_one(job: tuple[str, str, list[str]]) -> str:
        name, source, flags = job
        # -O1 last: what the compiler makes of the sources does not matter here, and takes ten seconds with -O3.
        arguments = [*build.FLAGS, *flags, "-O1", "-c", str(build.SOURCES / f"{source}.c"), "-o", f"{folder}/{name}.o"]
        subprocess.run([compiler, *arguments], check=True)
        return f"{folder}/{name}.o"

    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(compile_one, jobs))
    subprocess.run([compiler, "-shared", "-o", f"{folder}/amx.so", *objects, "-lm", "-lpthread"], check=True)
    library = Library(folder / "amx.so")
    assert library.instruction_set == "amx"
    library.start_threads(2)
    return library


@pytest.fixture
def same_as_avx2(emulated: Library, monkeypatch: pytest.MonkeyPatch) -> Same:
    """Asserts that something has the same result with AMX and with AVX2, bit for bit."""
    for module in (packed, host):
        monkeypatch.setattr(module, "library", lambda: emulated)

    def compare(compute: Callable[[], torch.Tensor]) -> None:
        results = []
        for name in (b"amx", b"avx2"):
            assert emulated.choose(name)
            results.append(compute())
        assert torch.equal(*results)

    return compare


@pytest.mark.parametrize("shape", [(17, 64), (100, 576), (80, 300), (40, 512)])
def test_amx_has_the_products_of_avx2(same_as_avx2: Same, shape: tuple[int, int]) -> None:
    compare_products(same_as_avx2, shape)


@pytest.mark.parametrize("family", COMPARED)
def test_amx_has_the_logits_of_avx2(same_as_avx2: Same, tmp_path: Path, family: str) -> None:
    same_as_avx2(all_logits(tmp_path, family))
