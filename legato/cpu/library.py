"""The C library, loaded with ctypes: its functions and structures, as `src/legato.h` has them.

Calls release the interpreter lock. Pointers are addresses of tensors that the caller keeps alive. `forward`,
`calibrate` and `apply` keep their buffers from call to call: they are for one thread at a time.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from legato.cpu.build import sources_digest

logger = logging.getLogger(__name__)

PATH = Path(__file__).parent / "legato_cpu.so"
GROUP = 32  # inputs that share a scale
BLOCK_ROWS = 16  # outputs that are stored interleaved
LANES = 16  # slots of the KV cache that are stored together
MAX_HEAD_DIM = 256
MAX_SHARING_HEADS = 192  # QUERY_ROWS: heads of queries that share a head of keys
FORM_4, FORM_8, FORM_K4, FORM_K6 = 4, 8, 16 + 4, 16 + 6  # the lowest four bits are those of a code
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class Shape(ctypes.Structure):
    """struct shape"""

    _fields_ = [
        *((name, c_int64) for name in ("num_layers", "hidden", "inner", "num_heads", "num_kv_heads", "head_dim")),
        ("rope_dim", c_int64),
        *((name, c_float) for name in ("eps", "scale", "soft_cap")),
        ("activation", c_int32),
        ("cos_sin", c_void_p),
    ]


class LayerPointers(ctypes.Structure):
    """struct layer"""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down", "norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", c_int64),
        *((name, c_void_p) for name in ("keys", "values")),
    ]


class StepPointers(ctypes.Structure):
    """struct step"""

    _fields_ = [
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "num_wanted", "block_size", "table_stride")),
        *((name, c_void_p) for name in ("positions", "slots", "counts", "context_lens", "tables", "wanted")),
    ]


class Library:
    """The functions that are exported, with the types of their arguments."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))

        def function(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
            found = getattr(loaded, f"legato_{name}")
            found.restype, found.argtypes = result, arguments
            return found

        p, i = c_void_p, c_int64
        self.choose = function("choose", c_char_p, c_char_p)
        self.start_threads = function("start_threads", c_int, c_int)
        self.block_bytes = function("block_bytes", c_int64, c_int, i)
        self.pack = function("pack", None, c_int, p, p, p, p, p, i, i, p)
        self.pack_dense = function("pack_dense", None, p, i, i, p)
        self.matrix = function("matrix", c_void_p, i, i, p)
        self.matrix_blocks = function("matrix_blocks", None, p, i, i, c_int, p)
        self.matrix_free = function("matrix_free", None, p)
        self.rows = function("rows", c_int, p, p, i, i, p)
        self.apply = function("apply", c_int, p, p, i, i, p, c_float, c_int, p)
        structures = [POINTER(each) for each in (Shape, LayerPointers, StepPointers)]
        self.forward = function("forward", c_int, *structures, p, p)
        self.calibrate = function("calibrate", c_int, *structures, p, p)
        self.best = function("best", None, p, i, i, p, p)
        sizes = (c_int64 * 3)()
        function("sizes", None, POINTER(c_int64))(sizes)
        ours = [ctypes.sizeof(structure) for structure in (Shape, LayerPointers, StepPointers)]
        digest = sources_digest()
        if list(sizes) != ours or digest not in (None, function("sources", c_char_p)().decode()):
            raise OSError(f"{path} was built from other sources: run `python legato/cpu/build.py`")
        self.instruction_set = self.choose(None).decode()


@cache
def library() -> Library | None:
    """The library, if it was built and can be loaded."""
    if not PATH.exists():
        return None
    try:
        return Library(PATH)
    except (OSError, AttributeError) as error:
        logger.warning("The CPU kernels cannot be loaded (%s); torch's products are used", error)
        return None
