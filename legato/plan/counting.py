"""Counts the memory of a model by building it on torch's meta device: real shapes, no storage.

Of weight files only the headers are read. Models that run through transformers are not built; their files are counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from legato.common.errors import ModelFileError, TooManyShards
from legato.kernels.lora.pages import PAGE_RANKS
from legato.layers.kv_cache import HybridShape, KVShape, StateShape, check_dtype_option
from legato.layers.shard import Shard
from legato.modelfiles.files import GgufModel, ModelFiles
from legato.modelfiles.gguf.file import GgmlType
from legato.models import checkpoint
from legato.models.config import ModelConfig
from legato.models.dummy import DummyWeights
from legato.models.expert_matrices import between_groups
from legato.models.gguf_source import GgufSource
from legato.models.host import on_host
from legato.models.methods import find_method, on_load
from legato.models.registry import ARCHITECTURES, CausalModel, architecture_for, open_source
from legato.models.sizes import Sizes
from legato.models.sources import STORED_DTYPES
from legato.models.targets import LoraLayout, usual_modules
from legato.plan.memory import BLOCK_SIZE, SHARDS, SIZES, ModelShape, ShardSize
from legato.quantization.affine import coded_like
from legato.quantization.dense import Weight
from legato.quantization.experts import ExpertWeights
from legato.quantization.gguf_forms import FORMS, packed_matrix
from legato.quantization.method import DENSE, Method
from legato.quantization.stored import MatrixSlice, Ranges
from legato.quantization.weight import Matrix

# Of GGUF, that a CPU computes with as they are; GPUs: `FORMS`.
FORM_NAMES = {ggml_type.name for ggml_type in FORMS}
# Floating-point formats of safetensors, which are loaded in the model's dtype; others stay as they are.
FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    shape: tuple[int, ...]
    format: str
    num_bytes: int

    def loaded_bytes(self, dtype: str) -> int:
        return math.prod(self.shape) * SIZES[dtype] if self.format in FLOATS else self.num_bytes


class CountingWeights(DummyWeights):
    """Makes tensors on the meta device and counts their bytes. With `stored`, the model sees the names and shapes of a
    checkpoint; without, every tensor that it asks for is there."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor] | None,
        dtype: torch.dtype,
        shard: Shard,
        method: Method = DENSE,
        device_kind: str = "cuda",
        packs: bool = False,
    ) -> None:
        super().__init__(dtype, torch.device("meta"), shard, method, packs)
        self.dequantizes = device_kind in checkpoint.DEQUANTIZED_ON
        self._stored_tensors = stored
        self.numbers: dict[str, int] = {}  # name -> how many this shard loads
        self.num_bytes = 0

    def __contains__(self, name: str) -> bool:
        return self._stored_tensors is None or name in self._stored_tensors

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Mapping[int, Ranges] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        self._check(name, shape)
        made = super().tensor(name, shape, cut, dtype)
        self.numbers[name] = made.numel()
        self.num_bytes += made.nbytes
        return made

    def raw(self, name: str, shape: tuple[int, ...], cut: Mapping[int, Ranges] | None = None) -> torch.Tensor:
        self._check(name, shape)
        made = super().tensor(name, shape, cut, torch.float32).to(self.stored_dtype(name))
        self.numbers[name] = made.numel()
        return made

    def stored_shape(self, name: str) -> tuple[int, ...]:
        if name not in self or self._stored_tensors is None:
            raise ModelFileError(f"the checkpoint has no tensor '{name}'")
        return self._stored_tensors[name].shape

    def stored_dtype(self, name: str) -> torch.dtype:
        assert self._stored_tensors is not None, "a layout is that of a checkpoint"
        return STORED_DTYPES.get(self._stored_tensors[name].format, torch.float32)

    def fault(self, name: str, what: str) -> ModelFileError:
        return ModelFileError(f"tensor '{name}' {what}")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if self._stored_tensors is not None and (found := self.stored_shape(name)) != shape:
            raise self.fault(name, f"has shape {found}, the configuration says {shape}")

    def _weight(self, *arguments: Any, **how: Any) -> Weight:
        """Counts what a matrix becomes, not what is read for it."""
        before = self.num_bytes
        weight = super()._weight(*arguments, **how)
        self.num_bytes = before + weight.nbytes
        return weight

    def matrix(self, *arguments: Any, **part: Any) -> Matrix:
        before = self.num_bytes
        matrix = super().matrix(*arguments, **part)
        self.num_bytes = before + matrix.nbytes
        return matrix

    def _packed_vocabulary(self, *arguments: Any, **how: Any) -> Weight:
        before = self.num_bytes
        weight = super()._packed_vocabulary(*arguments, **how)
        self.num_bytes = before + weight.nbytes
        return weight

    def _stored_matrix(self, wanted: MatrixSlice, *arguments: Any, **how: Any) -> Matrix:
        """What GGUF has in 4 bits is packed as it is, by a single shard on a CPU; on a GPU everything is that has a
        form."""
        matrix = super()._stored_matrix(wanted, *arguments, **how)
        stored = (self._stored_tensors or {}).get(f"{wanted.name}.weight")
        if stored is None or not isinstance(matrix, torch.Tensor):
            return matrix
        is_read = not self.packs and not self.dequantizes and self._method.quantizer is None
        if is_read and stored.format in FORM_NAMES:
            return self._gguf_form(wanted, matrix, GgmlType[stored.format])
        if not self.packs or self.shard.world_size > 1 or stored.format not in FORM_NAMES:
            return matrix
        coded = coded_like(matrix, GgmlType[stored.format])
        return matrix if coded is None else coded

    @staticmethod
    def _gguf_form(wanted: MatrixSlice, dense: torch.Tensor, ggml_type: GgmlType) -> Matrix:
        blocks = (dense.shape[0], wanted.in_features // ggml_type.block_size, ggml_type.block_bytes)
        matrix = packed_matrix(dense.new_empty(blocks, dtype=torch.uint8), ggml_type)
        if wanted.columns is not None and not between_groups(wanted.columns, matrix.groups.size):
            return dense
        return wanted.of_columns(matrix)

    def experts(self, *arguments: Any) -> tuple[ExpertWeights, ExpertWeights]:
        before = self.num_bytes
        gate_up, down = super().experts(*arguments)
        self.num_bytes = before + gate_up.nbytes + down.nbytes
        return gate_up, down


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """LoRA adapters to make room for, as --lora-device-ranks and --lora-target-modules say."""

    ranks: int
    modules: tuple[str, ...] = ()  # (): all linear layers


class CountedModel:
    """A model in this dtype, by its configuration and, where there are some, the headers of its files. `numbers` has
    how many numbers each tensor that it loads is."""

    def __init__(
        self,
        config: dict[str, Any],
        dtype: str,
        files: ModelFiles | None = None,
        quantize: str | None = None,
        device_kind: str = "cuda",
        adapters: AdapterRoom | None = None,
        packs: bool = False,
        kv_cache_dtype: str | None = None,
    ) -> None:
        self._config = config
        self._adapters = adapters
        self._device_kind, self._packs = device_kind, packs
        self._dtype = dtype
        self._stored = None if files is None else dict(_stored(files))
        self._path = "" if files is None else f"{files.path}: "
        self._method = self._find_method(files, quantize)
        sizes = Sizes.of(config)
        keys = sizes.keys
        inner = keys.count(
            "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff", default=4 * sizes.hidden_size
        )
        if isinstance(keys.get("num_local_experts", "num_experts", "n_routed_experts"), int):
            chosen = keys.count("num_experts_per_tok", default=2)
            inner = max(inner, chosen * keys.count("moe_intermediate_size", default=inner))
        num_layers, num_kv_heads, head_dim = sizes.num_layers, sizes.num_kv_heads, sizes.head_dim
        adapter_bytes = 0
        kv_dtype: str | None = None
        kv_numbers, state_bytes, block_size = 2 * num_layers * num_kv_heads * head_dim, 0, BLOCK_SIZE
        if is_native := sizes.model_type in ARCHITECTURES:
            model, weights = self._build(Shard())
            adapter_bytes = self._adapter_bytes(weights)
            self.numbers, num_bytes, kv = weights.numbers, weights.num_bytes, model.kv_shape
            kv_dtype = self._kv_dtype(model)
            sizes, num_layers, num_kv_heads, head_dim = model.config, kv.num_layers, kv.num_kv_heads, kv.head_dim
            check_dtype_option(kv_cache_dtype, kv, sizes.model_type)
            kv_numbers, state_bytes = kv.numbers_per_token, _state_bytes(kv)
            block_size = kv.block_size or BLOCK_SIZE
        else:
            assert self._stored is not None, "transformers has no shapes of ours"
            unused = {"lm_head.weight"} if keys.flag("tie_word_embeddings") else set()
            self.numbers = {name: math.prod(self._stored[name].shape) for name in self._stored.keys() - unused}
            num_bytes = sum(self._stored[name].loaded_bytes(dtype) for name in self.numbers)
        self._whole = ShardSize(1, num_bytes, kv_numbers, adapter_bytes, kv_dtype, state_bytes)
        self.shape = ModelShape(
            model_type=sizes.model_type,
            num_layers=num_layers,
            hidden_size=sizes.hidden_size,
            intermediate_size=inner,
            num_heads=sizes.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=sizes.vocab_size,
            max_positions=sizes.max_positions,
            is_native=is_native,
            block_size=block_size,
        )

    @staticmethod
    def _find_method(files: ModelFiles | None, quantize: str | None) -> Method:
        if files is None:
            return DENSE if quantize is None else on_load(quantize)
        return find_method(files, open_source(files), quantize)

    @property
    def formats(self) -> dict[str, int]:
        """Format -> bytes of the tensors in the files that the model loads."""
        found: Counter[str] = Counter()
        for name, tensor in (self._stored or {}).items():
            if name in self.numbers:
                found[tensor.format] += tensor.num_bytes
        return dict(found)

    def shard_sizes(self) -> Iterator[ShardSize]:
        """Of each number of shards that leaves none without a head: layers of one model may have different numbers of
        them."""
        for count in SHARDS if self.shape.is_native else SHARDS[:1]:
            try:
                yield self.shard_size(count)
            except TooManyShards:
                return

    def shard_size(self, num_shards: int) -> ShardSize:
        """Of the largest shard, which is the last."""
        if num_shards == 1:
            return self._whole
        model, weights = self._build(Shard(num_shards - 1, num_shards))
        kv = model.kv_shape
        sizes = weights.num_bytes, kv.numbers_per_token, self._adapter_bytes(weights)
        return ShardSize(num_shards, *sizes, _state_dtype(kv), _state_bytes(kv))

    def _adapter_bytes(self, weights: CountingWeights) -> int:
        """What a shard keeps on the device for LoRA adapters."""
        if self._adapters is None:
            return 0
        layout = LoraLayout(weights.targets, set(self._adapters.modules) or usual_modules(weights.targets))
        return self._adapters.ranks // PAGE_RANKS * layout.page_size * weights.dtype.itemsize

    def _kv_dtype(self, model: CausalModel) -> str | None:
        """Of the library that computes the layers, on one shard, or of states."""
        if (state_dtype := _state_dtype(model.kv_shape)) is not None:
            return state_dtype
        kv_shape = on_host(model).kv_shape if self._packs else model.kv_shape
        return None if kv_shape == model.kv_shape else str(kv_shape.dtype).removeprefix("torch.")

    def _build(self, shard: Shard) -> tuple[CausalModel, CountingWeights]:
        config = ModelConfig.from_hf(self._config)
        method = replace(self._method, num_layers=config.num_layers)
        weights = CountingWeights(
            self._stored, getattr(torch, self._dtype), shard, method, self._device_kind, self._packs
        )
        try:
            model: CausalModel = architecture_for(config.model_type)(config, weights)
        except ModelFileError as error:
            raise ModelFileError(f"{self._path}{error}") from None
        return model, weights


def _stored(files: ModelFiles) -> Iterator[tuple[str, StoredTensor]]:
    files.check_weights()
    if isinstance(files, GgufModel):
        source = GgufSource(files.weight_files()[0])
        for name in source.names():
            tensor = source.stored(name)
            yield name, StoredTensor(tensor.shape, tensor.type.name, tensor.nbytes)
        return
    for path in files.weight_files():
        for name, tensor in _header(path).items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                yield name, StoredTensor(tuple(tensor["shape"]), str(tensor.get("dtype")), end - begin)


def _header(path: Path) -> dict[str, Any]:
    """Of a safetensors file, which `check_weights` has found well-formed."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header


def _state_dtype(shape: KVShape) -> str | None:
    """Of a cache of states, which is the same whatever the model's is."""
    return str(shape.dtype).removeprefix("torch.") if isinstance(shape, StateShape) else None


def _state_bytes(shape: KVShape) -> int:
    """For each token, of states beside keys and values."""
    return shape.state_bytes_per_token if isinstance(shape, HybridShape) else 0
