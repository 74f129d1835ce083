"""The steps of the Dockerfile in a folder, up to an answer: `make test-docker`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from legato.common.sockets import free_port
from tests.packaging.conftest import end, generate, info, until_healthy
from tests.packaging.test_dockerfile import DOCKERFILE, run_steps

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> object:
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where the image has python and pip
    return run_steps.Steps(DOCKERFILE, tmp_path_factory.mktemp("image"))


def test_the_cpu_image_serves_a_model(steps: Any, model: Path) -> None:
    port = free_port()
    steps.run("cpu")
    words = ["--model-id", str(model), "--prometheus-port", "0", "--env"]
    process = steps.start("cpu", words, PORT=str(port), HOSTNAME="3f2a9c1d0b7e")
    try:
        until_healthy(process, port)
        assert generate(port)["details"]["generated_tokens"] == 5
        assert info(port)["docker_label"] == "cpu"
    finally:
        assert end(process) == 0


def test_the_sagemaker_image_serves_by_its_variables(steps: Any, model: Path) -> None:
    port = free_port()
    steps.run("sagemaker")
    variables = {"HF_MODEL_ID": str(model), "SM_NUM_GPUS": "1", "PORT": str(port), "NVIDIA_VISIBLE_DEVICES": ""}
    process = steps.start("sagemaker", ["serve"], **variables, PROMETHEUS_PORT="0")
    try:
        until_healthy(process, port)
        assert generate(port)["details"]["generated_tokens"] == 5
        assert info(port)["docker_label"] == "sagemaker"
    finally:
        assert end(process) == 0
