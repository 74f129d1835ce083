"""Small GGUF files, written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(path: Path, entries: dict[str, Any], architecture: str = "llama") -> Path:
    """Arrays become tensors, everything else metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in entries.items():
        match value:
            case np.ndarray():
                writer.add_tensor(key, value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
