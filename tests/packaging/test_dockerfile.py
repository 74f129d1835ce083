"""The Dockerfile and its entry points, as far as they can be looked at without building anything."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


run_steps = _load(ROOT / "docker" / "run_steps.py")


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    """A folder with a launcher that prints its arguments and variables."""
    program = tmp_path / "text-generation-launcher"
    program.write_text('#!/bin/sh\necho "arguments:$*"\nenv\n')
    program.chmod(0o755)
    return tmp_path


def enter(script: str, launcher: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": f"{launcher}:{os.environ['PATH']}", **variables}
    words = [str(ROOT / "docker" / script), *arguments]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)


def test_every_target_that_is_offered_is_a_stage_and_the_last_one_is_for_gpus() -> None:
    found = run_steps.stages(DOCKERFILE)
    assert {"cpu", "cuda", "sagemaker"} <= set(found)
    assert list(found)[-1] == run_steps.LAST and found[run_steps.LAST].base == "cuda"
    assert found["sagemaker"].base == "cuda"


def test_what_the_image_copies_from_the_repository_is_there_and_not_ignored() -> None:
    for stage in run_steps.stages(DOCKERFILE).values():
        for instruction in stage.instructions:
            if instruction.word == "COPY" and "--from" not in instruction.rest:
                source = instruction.rest.split()[0]
                assert (ROOT / source).exists(), source
                top = source.split("/")[0]
                assert top == "." or not run_steps._ignored(str(ROOT), [top])
    needed = ["legato", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"]
    assert run_steps._ignored(str(ROOT), [*needed, ".git", ".venv-dev", "tests"]) == {".git", ".venv-dev", "tests"}


def test_triton_s_version_is_left_to_torch() -> None:
    """torch's builds for CUDA require one exact version, so that the image for GPUs could not be built with another."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert "torch" in pinned and "triton" not in pinned


def test_the_container_s_arguments_are_the_launcher_s(launcher: Path) -> None:
    answer = enter("entrypoint.sh", launcher, "--model-id", "a model", "--num-shard", "2")
    assert answer.returncode == 0
    assert "arguments:--model-id a model --num-shard 2" in answer.stdout


@pytest.mark.parametrize("script", ["entrypoint.sh", "sagemaker-entrypoint.sh"])
def test_compiled_kernels_stay_in_the_volume(launcher: Path, script: str) -> None:
    cache = launcher / "data" / "legato"
    variables = {"HF_MODEL_ID": "org/name", "LEGATO_CACHE": str(cache)}
    lines = enter(script, launcher, **variables).stdout.splitlines()
    assert f"TRITON_CACHE_DIR={cache}/triton" in lines and (cache / "triton").is_dir()
    lines = enter(script, launcher, **variables, TRITON_CACHE_DIR="/elsewhere").stdout.splitlines()
    assert "TRITON_CACHE_DIR=/elsewhere" in lines


def test_a_volume_that_cannot_be_written_to_leaves_triton_the_user_s_folder(launcher: Path) -> None:
    (launcher / "file").touch()
    variables = {"LEGATO_CACHE": str(launcher / "file")}
    lines = enter("entrypoint.sh", launcher, **variables, HOME=str(launcher)).stdout.splitlines()
    assert not [line for line in lines if line.startswith("TRITON_CACHE_DIR")]
    lines = enter("entrypoint.sh", launcher, **variables, HOME="/nowhere").stdout.splitlines()
    assert "TRITON_CACHE_DIR=/tmp/triton" in lines


def test_sagemaker_s_variables_become_options(launcher: Path) -> None:
    variables = {
        "HF_MODEL_ID": "org/name",
        "HF_MODEL_REVISION": "main",
        "SM_NUM_GPUS": "4",
        "HF_MODEL_QUANTIZE": "awq",
        "HF_MODEL_TRUST_REMOTE_CODE": "true",
        "PORT": "8080",
    }
    lines = enter("sagemaker-entrypoint.sh", launcher, "serve", **variables).stdout.splitlines()
    assert lines[0] == "arguments:--port 8080"
    expected = {"MODEL_ID=org/name", "REVISION=main", "NUM_SHARD=4", "QUANTIZE=awq", "TRUST_REMOTE_CODE=true"}
    assert expected <= set(lines)


def test_sagemaker_s_unset_variables_set_nothing(launcher: Path) -> None:
    lines = enter("sagemaker-entrypoint.sh", launcher, HF_MODEL_ID="org/name").stdout.splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert "MODEL_ID" in names and not names & {"REVISION", "NUM_SHARD", "QUANTIZE", "TRUST_REMOTE_CODE"}


def test_sagemaker_without_a_model_is_told_what_to_set(launcher: Path) -> None:
    answer = enter("sagemaker-entrypoint.sh", launcher)
    assert answer.returncode == 1 and "HF_MODEL_ID must be set" in answer.stderr


@pytest.mark.parametrize(
    ("words", "variables", "url"),
    [
        ((), {"PORT": "80"}, "http://127.0.0.1:80/health"),
        (("--port", "8080"), {"PORT": "80"}, "http://127.0.0.1:8080/health"),
        (("--model-id", "a model", "--port=8080"), {"PORT": "80"}, "http://127.0.0.1:8080/health"),
        (("-p", "1"), {"PORT": "80"}, "http://127.0.0.1:1/health"),
        (("-p1",), {"PORT": "80"}, "http://127.0.0.1:1/health"),
        (("--port", "1"), {"AIP_HTTP_PORT": "2"}, "http://127.0.0.1:2/health"),
        (("--ssl-certfile=c.pem",), {"PORT": "443"}, "https://127.0.0.1:443/health"),
        ((), {"PORT": "443", "SSL_CERTFILE": "c.pem"}, "https://127.0.0.1:443/health"),
    ],
)
def test_the_health_check_asks_the_port_that_the_launcher_was_given(
    words: tuple[str, ...], variables: dict[str, str], url: str, tmp_path: Path
) -> None:
    (tmp_path / "curl").write_text('#!/bin/sh\necho "$2"\n')
    (tmp_path / "curl").chmod(0o755)
    command_line = ["/opt/legato/bin/python", "/opt/legato/bin/text-generation-launcher", *words]
    (tmp_path / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in command_line))
    assert enter("healthcheck.sh", tmp_path, str(tmp_path / "cmdline"), **variables).stdout == f"{url}\n"


def test_a_health_check_that_fails_says_so(tmp_path: Path) -> None:
    (tmp_path / "curl").write_text("#!/bin/sh\nexit 22\n")
    (tmp_path / "curl").chmod(0o755)
    (tmp_path / "cmdline").write_bytes(b"launcher\0")
    assert enter("healthcheck.sh", tmp_path, str(tmp_path / "cmdline")).returncode == 22
