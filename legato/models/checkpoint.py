"""Reads the tensors of a checkpoint by name, only this shard's part of each.

Keeps account: a tensor that is missing, left over or of the wrong shape is an error that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, Unpack

import torch

from legato.common.errors import ModelFileError
from legato.kernels.kv_format import KVScales
from legato.layers.shard import Shard
from legato.models.sources import Staging, TensorSource
from legato.models.targets import AdapterTarget, MatrixPart, TargetCut
from legato.quantization.kv_scales import read_scales, scale_names
from legato.quantization.method import DENSE, Method
from legato.quantization.stored import Ranges
from legato.quantization.weight import QuantizedWeight

T = TypeVar("T")
Progress = Callable[[int, int], None]  # bytes read so far, bytes in all

# What old checkpoints carry along and no model reads.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
# Where no product of quantized matrices is as fast as that of dense ones: there they become dense when they are loaded.
DEQUANTIZED_ON = {"cpu"}
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Checkpoint:
    """`method` says how matrices are stored, or what dense ones become; `packs` that products on the CPU read them
    packed."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
        progress: Progress | None = None,
        method: Method = DENSE,
        packs: bool = False,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.packs = packs
        self.dequantizes = device.type in DEQUANTIZED_ON
        self.shard = shard or Shard()
        self._source = source
        self._names = source.names()
        self._unused = set(self._names)
        self._progress = progress
        self._method = method
        self._staging = Staging(device)
        self._total = source.nbytes() // (self.shard.world_size * self.shard.num_stages)
        self._read_bytes = 0
        self.targets: list[AdapterTarget] = []  # the layers that adapters may change
        self.quantized: list[QuantizedWeight] = []  # of which matrices in 8 bits may be kept, too
        self.kinds: Counter[str] = Counter()  # of quantized matrices, with their products, and how many there are

    def _target(self, layer: T, parts: Sequence[MatrixPart], in_features: int, **cut: Unpack[TargetCut]) -> T:
        """Note a layer that adapters may change; returns it."""
        self.targets.append(AdapterTarget(layer, tuple(parts), in_features, **cut))
        return layer

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def prefix(self, usual: str, name: str) -> str:
        """`usual` where the checkpoint's names begin with it, as that of the tensor `name` shows. Many old checkpoints
        are of the model without its head, and have no prefix."""
        return "" if name in self and usual + name not in self else usual

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Mapping[int, Ranges] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor that has this `shape` in the checkpoint. `cut` maps dimensions to the ranges that are wanted of
        them; `dtype` is for what must be more exact than the model."""
        raw = self._stored(name, shape, cut)
        if not raw.is_floating_point() or raw.dtype in EIGHT_BIT_FLOATS:
            raise self.fault(name, f"has type {raw.dtype}; expected float32, float16 or bfloat16")
        made = self._staging.copy(raw).to(dtype or self.dtype)
        if made.data_ptr() != raw.data_ptr():
            self._source.forget(name)
        return made

    def raw(self, name: str, shape: tuple[int, ...], cut: Mapping[int, Ranges] | None = None) -> torch.Tensor:
        """For readers of quantized layouts: of any dtype, and a copy."""
        stored = self._stored(name, shape, cut)
        made = stored.clone() if self.device.type == "cpu" else self._staging.copy(stored)
        self._source.forget(name)
        return made

    def kv_scales(self, layers: Sequence[int]) -> tuple[KVScales | None, ...]:
        """What keys and values of these layers are divided by in an 8-bit cache; (): nothing is."""
        names = scale_names(self._names) if self._method.has_kv_scales else {}
        found = tuple(read_scales(names.get(i), lambda name: self._source.read(name, ()), self) for i in layers)
        return found if any(found) else ()

    def _forget(self, name: str) -> None:
        """What was read of a tensor is not needed any more."""
        self._source.forget(name)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        if name not in self:
            raise ModelFileError(f"the checkpoint has no tensor '{name}'")
        return self._source.shape(name)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def fault(self, name: str, what: str) -> ModelFileError:
        return ModelFileError(f"{self._source.file(name)}: tensor '{name}' {what}")

    def _stored(self, name: str, shape: tuple[int, ...], cut: Mapping[int, Ranges] | None) -> torch.Tensor:
        found = self.stored_shape(name)
        self._unused.discard(name)
        if found != shape:
            raise self.fault(name, f"has shape {found}, the configuration says {shape}")
        raw = self._read(name, shape, cut or {})
        self._read_bytes += raw.nbytes
        if self._progress is not None:
            self._progress(self._read_bytes, self._total)
        return raw

    def _read(
        self, name: str, shape: tuple[int, ...], cut: Mapping[int, Ranges], index: tuple[slice, ...] = ()
    ) -> torch.Tensor:
        """Range by range, dimension by dimension."""
        dim = len(index)
        if not any(other >= dim for other in cut):
            return self._source.read(name, index)
        ranges = cut.get(dim, [(0, shape[dim])])
        pieces = [self._read(name, shape, cut, (*index, slice(first, last))) for first, last in ranges]
        return _joined(pieces, dim)

    def skip(self, name: str) -> None:
        """`name` may be there and need not be read."""
        self._unused.discard(name)

    def skip_below(self, prefix: str) -> None:
        """The same for every name that begins with `prefix` and a dot: a part of the model that is not served."""
        self._unused = {name for name in self._unused if not name.startswith(f"{prefix}.")}

    def check_all_used(self) -> None:
        if self.shard.num_stages > 1:  # what is left is the other stages'
            return
        unread = IGNORED_SUFFIXES + (self._method.reader.unread if self._method.reader is not None else ())
        left = sorted(name for name in self._unused if not name.endswith(unread) and not self._is_empty_bias(name))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ModelFileError(f"the checkpoint has tensors that the model does not: {', '.join(left[:3])}{more}")

    def _is_empty_bias(self, name: str) -> bool:
        """AutoGPTQ used to write a bias of zeros for layers that have none."""
        reader, module = self._method.reader, name.removesuffix(".bias")
        if reader is None or module == name or not reader.has(module, self):
            return False
        return not self._source.read(name, ()).any()


def _joined(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
