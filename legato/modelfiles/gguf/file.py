"""Reader of GGUF, the single-file model format of ggml.

    "GGUF" version  tensor count  metadata count
    metadata        (key, type, value) ...
    tensors         (name, shape, type, offset) ...
    padding         to `general.alignment`
    data            every tensor at its offset

`GgufFile.open` parses everything up to the padding and maps the rest. Every count and offset is checked against the
size of the file before it is used, so a truncated or malicious file ends in a `ModelFileError` within milliseconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.common.errors import ModelFileError, ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535
# Minimum size of a metadata entry (length, one letter, type, one byte) and of a tensor entry (length, rank, type,
# offset). A count that cannot fit into the file is refused before anything is allocated.
MIN_ENTRY_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


class GgmlType(IntEnum):
    """Storage format of a tensor: its number in the file, then values and bytes per block. Rows are whole blocks."""

    block_size: int
    block_bytes: int

    # The defaults are for mypy: a lookup has one argument.
    def __new__(cls, number: int, block_size: int = 0, block_bytes: int = 0) -> GgmlType:
        member = int.__new__(cls, number)
        member._value_, member.block_size, member.block_bytes = number, block_size, block_bytes
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of a tensor: `shape` in row-major order (reversed in the file), `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int


class GgufFile:
    """A parsed header and the memory-mapped data."""

    def __init__(
        self, path: Path, version: int, metadata: dict[str, Any], tensors: dict[str, GgufTensor], data: mmap.mmap
    ) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        data = _map(path)
        cursor = _Cursor(path, data)
        version = _read_version(cursor)
        num_tensors = cursor.count("tensor count", MIN_TENSOR_BYTES)
        num_entries = cursor.count("metadata count", MIN_ENTRY_BYTES)
        metadata = _read_metadata(cursor, num_entries)
        tensors = _read_tensors(cursor, num_tensors, _alignment(path, metadata))
        return cls(path, version, metadata, tensors, data)

    def raw(self, name: str) -> Bytes:
        """The bytes of a tensor in the file: a read-only view that keeps the mapping alive."""
        import numpy as np  # here: programs that only read the metadata save 10 MB and a third of a second

        tensor = self.tensors[name]
        return np.frombuffer(self._data, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def forget(self, name: str) -> None:
        """Release the pages that contain only this tensor. They are read again on access."""
        tensor = self.tensors[name]
        first = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (tensor.offset + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, first, last - first)


class _Cursor:
    """A position in the file that never exceeds its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def malformed(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}; the file is damaged, download it again")

    def truncated(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path} is truncated: it ends after {self.size} bytes, in {what}; download it again"
        )

    def skip(self, num_bytes: int, what: str) -> int:
        """Skip `num_bytes` and return the position before them."""
        begin = self.position
        if num_bytes > self.size - begin:
            raise self.truncated(what)
        self.position = begin + num_bytes
        return begin

    def number(self, fmt: struct.Struct, what: str) -> Any:
        return fmt.unpack_from(self.data, self.skip(fmt.size, what))[0]

    def count(self, what: str, min_item_bytes: int) -> int:
        """A number of items, which must fit into the rest of the file."""
        count: int = self.number(_U64, what)
        if count * min_item_bytes > self.size - self.position:
            raise self.truncated(f"a {what} of {count}")
        return count

    def name(self, what: str) -> str:
        """A key or tensor name: unlike other strings it must be valid UTF-8 and of limited length."""
        length: int = self.number(_U64, what)
        if length > MAX_NAME_BYTES:
            raise self.malformed(f"a {what} of {length} bytes")
        begin = self.skip(length, what)
        try:
            return self.data[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise self.malformed(f"a {what} is not UTF-8") from None

    def texts(self, count: int, what: str) -> list[str]:
        """`count` consecutive strings. This loop dominates the time to open a file, hence the local names."""
        data, size, unpack = self.data, self.size, _U64.unpack_from
        position = self.position
        texts = []
        for _ in range(count):
            begin = position + 8
            if begin > size:
                raise self.truncated(what)
            position = begin + unpack(data, position)[0]
            if position > size:
                raise self.truncated(what)
            texts.append(str(data[begin:position], "utf-8", "replace"))
        self.position = position
        return texts


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if not file.read(len(MAGIC)) == MAGIC:
                raise ModelFileError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None


def _read_version(cursor: _Cursor) -> int:
    cursor.skip(len(MAGIC), "the magic number")
    version: int = cursor.number(_U32, "the version")
    if version in SUPPORTED_VERSIONS:
        return version
    if version & 0xFFFF == 0:
        raise UnsupportedModel(f"{cursor.path} is a big-endian GGUF file; Legato reads little-endian ones")
    raise UnsupportedModel(f"{cursor.path} is GGUF version {version}; Legato reads versions 2 and 3")


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.name("metadata key")
        if key in metadata:
            raise cursor.malformed(f"the metadata key '{key}' occurs twice")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Any:
    what = f"the value of '{key}'"
    value_type: int = cursor.number(_U32, what)
    if value_type == _STRING:
        return cursor.texts(1, what)[0]
    if value_type == _ARRAY:
        return _read_array(cursor, key)
    if value_type in _SCALARS:
        return cursor.number(_SCALARS[value_type], what)
    raise cursor.malformed(f"'{key}' has the unknown type {value_type}")


def _read_array(cursor: _Cursor, key: str) -> list[Any]:
    what = f"the array '{key}'"
    item_type: int = cursor.number(_U32, what)
    if item_type == _STRING:
        return cursor.texts(cursor.count(what, _U64.size), what)
    if item_type not in _SCALARS:
        raise cursor.malformed(f"'{key}' is an array of unknown type {item_type}")
    fmt = _SCALARS[item_type]
    count = cursor.count(what, fmt.size)
    begin = cursor.skip(count * fmt.size, what)
    return list(struct.unpack_from(f"<{count}{fmt.format[-1]}", cursor.data, begin))


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelFileError(f"{path}: general.alignment must be a power of two, not {alignment!r}")
    return alignment


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        tensor = _read_tensor(cursor, alignment)
        if tensor.name in tensors:
            raise cursor.malformed(f"the tensor '{tensor.name}' occurs twice")
        tensors[tensor.name] = tensor
    data_begin = -(-cursor.position // alignment) * alignment
    return {name: _with_file_offset(cursor, tensor, data_begin) for name, tensor in tensors.items()}


def _read_tensor(cursor: _Cursor, alignment: int) -> GgufTensor:
    """One tensor entry. Its offset is relative to the data section, which begins after the last entry."""
    name = cursor.name("tensor name")
    what = f"the description of tensor '{name}'"
    rank: int = cursor.number(_U32, what)
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise cursor.malformed(f"tensor '{name}' has {rank} dimensions")
    shape = tuple(cursor.number(_U64, what) for _ in range(rank))[::-1]
    number: int = cursor.number(_U32, what)
    offset: int = cursor.number(_U64, what)
    try:
        ggml_type = GgmlType(number)
    except ValueError:
        raise UnsupportedModel(f"{cursor.path}: tensor '{name}' has the unknown ggml type {number}") from None
    if min(shape) < 1 or shape[-1] % ggml_type.block_size:
        raise cursor.malformed(f"tensor '{name}' of type {ggml_type.name} cannot have the shape {list(shape)}")
    if offset % alignment:
        raise cursor.malformed(f"tensor '{name}' is misaligned: offset {offset}, alignment {alignment}")
    nbytes = math.prod(shape) // ggml_type.block_size * ggml_type.block_bytes
    return GgufTensor(name, shape, ggml_type, offset, nbytes)


def _with_file_offset(cursor: _Cursor, tensor: GgufTensor, data_begin: int) -> GgufTensor:
    offset = data_begin + tensor.offset
    if offset + tensor.nbytes > cursor.size:
        raise cursor.truncated(f"tensor '{tensor.name}', which needs {offset + tensor.nbytes} bytes")
    return GgufTensor(tensor.name, tensor.shape, tensor.type, offset, tensor.nbytes)
