"""The way of a tensor to its device, in pieces that are smaller than it, and what stays behind of its file."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from legato.models.gguf_source import GgufSource
from legato.models.mapped import MappedFiles
from legato.models.sources import DIRECT_BYTES, SafetensorsSource, Staging, TensorSource
from legato.models.weights import Weights
from tests.server.local import DEVICE


@pytest.mark.parametrize("num_bytes", [64, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pieces_make_up_the_tensor(num_bytes: int, dtype: torch.dtype) -> None:
    staging = Staging(DEVICE, num_bytes)
    for shape in ((7, 31), (1,), (3, 5, 33)):  # one after the other through the same buffers
        tensor = torch.randn(shape).to(dtype)
        arrived = staging.staged(tensor)
        assert arrived.dtype == dtype and arrived.device.type == DEVICE.type
        assert torch.equal(arrived.cpu().view(torch.uint8), tensor.view(torch.uint8))


def test_columns_of_a_matrix_arrive_in_order() -> None:
    matrix = torch.arange(48.0).view(6, 8)
    assert torch.equal(Staging(DEVICE, 20).staged(matrix[:, 2:5]).cpu(), matrix[:, 2:5])


def test_on_a_cpu_a_mapped_tensor_is_not_copied() -> None:
    tensor = torch.zeros(2 * DIRECT_BYTES)
    assert Staging(torch.device("cpu")).copy(tensor).data_ptr() == tensor.data_ptr()


MEGABYTES = 32
ROWS, COLUMNS = MEGABYTES * 1024, 256  # of float32
tells_mappings = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where files are mapped")


def safetensors_source(folder: Path, matrix: torch.Tensor) -> TensorSource:
    save_file({"a": matrix, "b": torch.ones(3)}, folder / "model.safetensors")
    return SafetensorsSource([folder / "model.safetensors"])


def gguf_source(folder: Path, matrix: torch.Tensor) -> TensorSource:
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_head_count(4)
    writer.add_tensor("a", matrix.numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return GgufSource(folder / "model.gguf")


def mapped_megabytes() -> float:
    """What is resident of mapped files."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssFile"].split()[0]) / 1024


@tells_mappings
@pytest.mark.parametrize("make", [safetensors_source, gguf_source])
def test_a_forgotten_tensor_takes_no_memory_and_can_be_read_again(make, tmp_path: Path) -> None:
    matrix = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    source = make(tmp_path, matrix)
    before = mapped_megabytes()
    assert source.read("a", ()).sum() == matrix.sum()
    assert mapped_megabytes() > before + 0.9 * MEGABYTES
    source.forget("a")
    assert mapped_megabytes() < before + 0.1 * MEGABYTES
    assert torch.equal(source.read("a", ()), matrix)
    assert torch.equal(source.read("a", (slice(5, 9),)), matrix[5:9])


@tells_mappings
def test_a_checkpoint_that_is_cast_leaves_nothing_of_its_file_in_memory(tmp_path: Path) -> None:
    matrix = torch.ones(ROWS, COLUMNS)
    weights = Weights(safetensors_source(tmp_path, matrix), torch.bfloat16, torch.device("cpu"))
    before = mapped_megabytes()
    assert weights.tensor("a", (ROWS, COLUMNS)).sum(dtype=torch.float32) == ROWS * COLUMNS
    assert mapped_megabytes() < before + 0.1 * MEGABYTES


def test_memory_that_is_no_file_is_never_given_back(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(4096))
    owned = torch.full((1 << 20,), 7.0)
    MappedFiles([tmp_path / "other"]).release(owned)
    assert torch.equal(owned, torch.full((1 << 20,), 7.0))


@tells_mappings
def test_neighbours_of_a_released_tensor_keep_their_values(tmp_path: Path) -> None:
    """Three tensors that share pages: a private mapping would lose what was written to it, so this can be seen."""
    numbers = np.arange(3 * 3000, dtype=np.float32)
    numbers.tofile(tmp_path / "numbers")
    storage = torch.from_file(str(tmp_path / "numbers"), shared=False, size=len(numbers), dtype=torch.float32)
    storage += 1.0
    before, middle, after = storage.split(3000)
    MappedFiles([tmp_path / "numbers"]).release(middle)
    expected = torch.from_numpy(numbers).split(3000)
    assert torch.equal(before, expected[0] + 1.0) and torch.equal(after, expected[2] + 1.0)
    assert middle.sum() < (expected[1] + 1.0).sum(), "no page lies in the middle alone"
