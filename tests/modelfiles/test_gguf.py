"""The GGUF reader, against files of the `gguf` package's writer and against files that nobody should write."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legato.common.errors import ModelError, ModelFileError, ModelNotFound, UnsupportedModel
from legato.modelfiles.gguf.file import GgmlType, GgufFile
from tests.stopwatch import Stopwatch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small file with every kind of value and tensors of several types."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_int64("a.negative", -(1 << 40))
    writer.add_float32("a.ratio", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "Größe 🚀")
    writer.add_array("a.texts", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.flags", [True, False])
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.ones(5, dtype=np.float16))
    quantised = gguf.quants.quantize(np.ones((2, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantised", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header(*, version: int = 3, tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes = b"t", shape: tuple[int, ...] = (4,), ggml_type: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, ggml_type, offset)


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    return path


def test_metadata_comes_back_as_it_was_written(model: Path) -> None:
    metadata = GgufFile.open(model).metadata
    expected: dict[str, Any] = {
        "general.architecture": "llama",
        "a.count": 7,
        "a.negative": -(1 << 40),
        "a.ratio": 0.5,
        "a.flag": True,
        "a.text": "Größe 🚀",
        "a.texts": ["x", "", "日本"],
        "a.numbers": [1, -2, 3],
        "a.flags": [True, False],
    }
    assert metadata == expected


def test_shapes_are_in_row_major_order(model: Path) -> None:
    shapes = {name: (stored.shape, stored.type) for name, stored in GgufFile.open(model).tensors.items()}
    assert shapes == {
        "plain": ((3, 4), GgmlType.F32),
        "half": ((5,), GgmlType.F16),
        "quantised": ((2, 64), GgmlType.Q8_0),
    }


def test_raw_bytes_are_a_read_only_view_of_the_file(model: Path) -> None:
    raw = GgufFile.open(model).raw("plain")
    assert raw.view(np.float32).tolist() == list(range(12))
    assert not raw.flags.owndata
    assert not raw.flags.writeable


def test_raw_bytes_outlive_the_object_that_gave_them(model: Path) -> None:
    raw = GgufFile.open(model).raw("half")
    assert raw.view(np.float16).tolist() == [1.0] * 5


def test_block_sizes_are_those_of_the_format() -> None:
    reference = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {int(kind): (kind.block_size, kind.block_bytes) for kind in GgmlType}.items() <= reference.items()


def test_a_vocabulary_of_50_000_tokens_is_read_quickly(tmp_path: Path) -> None:
    tokens = [text(f"token {number}".encode()) for number in range(50_000)]
    array = struct.pack("<IIQ", 9, 8, len(tokens)) + b"".join(tokens)
    path = write(tmp_path, header(entries=2) + text(b"tokens") + array + text(b"merges") + array)
    stopwatch = Stopwatch()
    GgufFile.open(path)
    assert stopwatch.seconds < 1.0  # 40 ms on an idle core


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_file_truncated_anywhere_is_reported_by_name(model: Path, data: st.DataObject) -> None:
    whole = model.read_bytes()
    last = max(stored.offset + stored.nbytes for stored in GgufFile.open(model).tensors.values())
    cut = data.draw(st.integers(4, last - 1))
    broken = model.with_name("broken.gguf")
    broken.write_bytes(whole[:cut])
    with pytest.raises(ModelFileError, match=r"broken\.gguf is truncated"):
        GgufFile.open(broken)


@given(position=st.integers(4, 700), value=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_changed_byte_gives_a_model_or_a_model_error(model: Path, position: int, value: int) -> None:
    content = bytearray(model.read_bytes())
    content[position % len(content)] = value
    broken = model.with_name("flipped.gguf")
    broken.write_bytes(content)
    try:
        opened = GgufFile.open(broken)
    except ModelError:
        return
    for name, stored in opened.tensors.items():
        assert opened.raw(name).nbytes == stored.nbytes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(tensors=1 << 60), "truncated.*tensor count"),
        (header(entries=1 << 60), "truncated.*metadata count"),
        (header(entries=1) + text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61), "truncated.*array 'k'"),
        (header(entries=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61), "truncated.*array 'k'"),
        (header(entries=1) + text(b"k") + struct.pack("<IQ", 8, 1 << 62), "truncated.*value of 'k'"),
        (header(entries=1) + struct.pack("<Q", 1 << 40) + bytes(8), "metadata key of 1099511627776 bytes"),
        (header(entries=1) + text(b"k\xff") + struct.pack("<IB", 0, 1), "metadata key is not UTF-8"),
        (header(entries=1) + text(b"k") + struct.pack("<IQ", 99, 0), "unknown type 99"),
        (header(entries=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(16), "array of unknown type 9"),
        (header(entries=2) + 2 * (text(b"k") + struct.pack("<IB", 0, 1)) + bytes(9), "'k' occurs twice"),
        (header(tensors=2) + tensor() + tensor() + bytes(64), "'t' occurs twice"),
        (header(tensors=1) + tensor(shape=()) + bytes(64), "0 dimensions"),
        (header(tensors=1) + tensor(shape=(1, 1, 1, 1, 1)) + bytes(64), "5 dimensions"),
        (header(tensors=1) + tensor(shape=(4, 0)) + bytes(64), r"cannot have the shape \[0, 4\]"),
        (header(tensors=1) + tensor(shape=(33,), ggml_type=2) + bytes(64), "type Q4_0 cannot have the shape"),
        (header(tensors=1) + tensor(shape=(1 << 62, 1 << 62)) + bytes(64), "truncated.*tensor 't'"),
        (header(tensors=1) + tensor(offset=1 << 60) + bytes(64), "truncated.*tensor 't'"),
        (header(tensors=1) + tensor(offset=8) + bytes(64), "misaligned: offset 8"),
        (
            header(entries=1) + text(b"general.alignment") + struct.pack("<II", 4, 24) + bytes(32),
            "alignment must be a power of two, not 24",
        ),
    ],
)
def test_a_malicious_header_is_refused_with_the_reason(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=rf"hostile\.gguf.*{message}"):
        GgufFile.open(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=1) + tensor(ggml_type=4) + bytes(64), "ggml type 4"),
    ],
)
def test_unsupported_files_are_reported_as_unsupported(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        GgufFile.open(write(tmp_path, content))


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    content = header(version=2, entries=1) + text(b"k") + struct.pack("<If", 6, 1.5)
    assert GgufFile.open(write(tmp_path, content)).metadata == {"k": 1.5}


def test_data_begins_at_the_alignment_that_the_file_states(tmp_path: Path) -> None:
    alignment = text(b"general.alignment") + struct.pack("<II", 4, 128)
    content = header(tensors=1, entries=1) + alignment + tensor()
    content += bytes(-len(content) % 128) + np.arange(4, dtype="<f4").tobytes()
    opened = GgufFile.open(write(tmp_path, content))
    assert opened.raw("t").view("<f4").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file"])
def test_another_kind_of_file_is_recognised(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        GgufFile.open(write(tmp_path, content))


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        GgufFile.open(tmp_path / "none.gguf")
