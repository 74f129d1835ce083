"""Runs causal models of transformers on the paged KV cache, for architectures without their own implementation.

transformers computes everything but attention, which its models look up by name. Ours stores keys and values in the
KV cache and attends over blocks, so a step of many sequences is to the model one sequence whose positions jump. That
is right as long as nothing but attention looks at other tokens. Models that say otherwise (state spaces, convolutions,
their own attention) are refused, and an `IsolationProbe` finds those that do not say so.

`registry.py` imports this module, and with it transformers, when a model asks for it and `foreign.py` has let it pass.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
import transformers
from transformers.modeling_outputs import MoeModelOutputWithPast

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.layers.attention import SelfAttention
from legato.layers.kv_cache import KVCache, KVShape
from legato.layers.shard import Heads, Shard
from legato.layers.step import Step
from legato.modelfiles.files import ModelFiles
from legato.models import foreign
from legato.models.config import ModelConfig

logger = logging.getLogger(__name__)

NAME = "legato"  # of our attention, among those of transformers
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as config.json has them
# Positions of a probe, whose last token stays while the others change.
PROBE_POSITIONS = (0, 1, 2, 3)
# Far above the rounding of any format, far below the effect of another token that is attended to.
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention as the model asks for it: q [1, heads, T, head_dim], k and v [1, kv_heads, T, …]."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | None
    window: int
    soft_cap: float

    @property
    def heads(self) -> Heads:
        num_heads, num_kv_heads = self.q.shape[1], self.k.shape[1]
        sizes = self.k.shape[3], self.v.shape[3]
        return Heads(num_heads, num_kv_heads, *sizes, 0, num_heads, 0, num_kv_heads)


class AttentionBackend(Protocol):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[T, heads, v_head_dim]"""
        ...


# Whose forward is running. transformers hands our function the layer, and nothing about the step.
_running: ContextVar[AttentionBackend] = ContextVar("attending")


@contextmanager
def _using(by: AttentionBackend) -> Iterator[None]:
    token = _running.set(by)
    try:
        yield
    finally:
        _running.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls as its attention `legato`."""
    if attention_mask is not None:
        raise UnsupportedModel("it uses its own attention mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedModel("its attention is not causal")
    if others.get("s_aux") is not None:
        raise UnsupportedModel("its attention has sinks")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel("its attention layers have no `layer_idx`")
    call = AttentionCall(int(layer), query, key, value, scaling, int(sliding_window or 0), float(softcap or 0.0))
    return _running.get().attend(call)[None], None


transformers.AttentionInterface.register(NAME, _attention)


class PagedBackend:
    """Attention of one step, in the cache."""

    def __init__(self, step: Step, cache: KVCache) -> None:
        self.step = step
        self.cache = cache

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = self.cache.layers[call.layer]
        attention = _self_attention(call.heads, call.scale, call.window, call.soft_cap)
        q, k, v = (x[0].transpose(0, 1) for x in (call.q, call.k, call.v))
        return attention.separate(q, k, v, layer, self.step).unflatten(1, (q.shape[1], v.shape[2]))


@cache
def _self_attention(heads: Heads, scale: float | None, window: int, soft_cap: float) -> SelfAttention:
    return SelfAttention(heads, scale=scale, window=window, soft_cap=soft_cap)


class IsolationProbe:
    """A forward in which attention shows a token nothing but itself: its query, key and value come back as a sum.

    What still changes a token when others change is not attention. On the way every layer says what it has to store.
    """

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.calls:
            raise UnsupportedModel(f"layer {call.layer} attends more than once")
        self.calls[call.layer] = call
        heads = call.heads
        if heads.num_heads % heads.num_kv_heads or heads.v_head_dim > heads.head_dim:
            raise UnsupportedModel(f"layer {call.layer} has heads that the cache cannot store")
        k, v = (x.repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=1) for x in (call.k, call.v))
        return ((call.q + k)[..., : heads.v_head_dim] + v)[0].transpose(0, 1)

    def kv_shape(self, num_layers: int, dtype: torch.dtype) -> KVShape:
        if sorted(self.calls) != list(range(num_layers)):
            raise UnsupportedModel(f"only {len(self.calls)} of its {num_layers} layers call the attention function")
        shapes = {(call.heads.num_kv_heads, call.heads.head_dim) for call in self.calls.values()}
        if len(shapes) > 1:
            raise UnsupportedModel("its layers have different numbers or sizes of key heads")
        ((num_kv_heads, head_dim),) = shapes
        return KVShape(num_layers, num_kv_heads, head_dim, dtype)

    def check_windows(self, config: Any) -> None:
        """A window that the model keeps for its mask, which we do not ask for, would be lost."""
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        kinds = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * len(self.calls)
        if any(kinds[layer] == SLIDING and not call.window for layer, call in self.calls.items()):
            raise UnsupportedModel("its sliding window is not passed to the attention function")


class PrecomputedBody(torch.nn.Module):
    """Stands where the model's body was: the head, with all that the model does to logits, gets what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Any = None  # [1, m, hidden_size]

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class Fallback:
    """A `CausalModel` around one of transformers."""

    can_capture = False  # whatever it does between two kernels, it may do on the host

    def __init__(self, config: ModelConfig, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._body, self._head, self._precomputed = model.base_model, model, PrecomputedBody()
        if self._body is model or "position_ids" not in inspect.signature(self._body.forward).parameters:
            raise UnsupportedModel("its forward takes no `position_ids`")
        setattr(model, model.base_model_prefix, self._precomputed)
        model.requires_grad_(False)
        probe, hidden_size, vocab_size = self._probe(config, device)
        probe.check_windows(self._body.config)
        self.kv_shape = probe.kv_shape(config.num_layers, dtype)
        self.config = replace(
            config, vocab_size=vocab_size, hidden_size=hidden_size, num_kv_heads=self.kv_shape.num_kv_heads
        )

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        with _using(PagedBackend(step, cache)):
            return step.wanted(self._run(step.input_ids, step.positions))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._precomputed.hidden = hidden[None]
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self._body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _probe(self, config: ModelConfig, device: torch.device) -> tuple[IsolationProbe, int, int]:
        """The last of some tokens, with others before it and, the second time, one at the end of the context.

        Returns the sizes of its hidden state and of its logits besides.
        """
        far = (*PROBE_POSITIONS[:2], config.max_positions - 1, PROBE_POSITIONS[-1])
        hidden = []
        for first, positions in ((3, PROBE_POSITIONS), (7, far)):
            probe = IsolationProbe()
            ids = [(first + i) % config.vocab_size for i in PROBE_POSITIONS[:-1]] + [1]
            with _using(probe):
                hidden.append(self._run(torch.tensor(ids, device=device), torch.tensor(positions, device=device)))
        one, other = (states[-1].float() for states in hidden)
        if (one - other).norm() > TOLERANCE * one.norm():
            raise UnsupportedModel("something besides attention mixes tokens")
        return probe, hidden[0].shape[1], self.logits(hidden[0]).shape[1]


def model_config(files: ModelFiles, trust_remote_code: bool) -> ModelConfig:
    """config.json with what it leaves out, as transformers knows it, of a model that may run here."""
    found = _config(files, trust_remote_code)
    with _naming(found.model_type):
        _architecture(found, trust_remote_code)
    return ModelConfig.from_hf(found.to_dict())


def load(
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None,
    dummy: bool,
    trust_remote_code: bool,
) -> Fallback:
    """Everything that can be wrong without its weights is said before they are read."""
    kind = config.model_type
    if shard is not None and shard.world_size > 1:
        raise UnsupportedModel(f"model_type '{kind}' runs through transformers, on one shard only: use --num-shard 1")
    if config.rope_option is not None:
        raise UnsupportedModel(f"model_type '{kind}' runs through transformers, which does not support --rope-scaling")
    found = _config(files, trust_remote_code)
    transformers.utils.logging.set_verbosity_error()  # what matters of it is said by us
    transformers.utils.logging.disable_progress_bar()
    with _naming(kind):
        architecture = _architecture(found, trust_remote_code)
        if dummy:
            with torch.device(device):
                model = architecture._from_config(found, dtype=dtype, attn_implementation=NAME)
        else:
            model = _from_files(architecture, files, found, dtype, device)
        fallback = Fallback(config, model.eval(), dtype, device)
    logger.info("%s runs through transformers %s: slower, and on one shard", kind, transformers.__version__)
    return fallback


def _config(files: ModelFiles, trust_remote_code: bool) -> Any:
    """transformers' view of config.json. Code from the model's repository runs only for who asked for it."""
    foreign.check(files, trust_remote_code, transformers.CONFIG_MAPPING)
    with _naming(str(files.config().get("model_type"))):
        return transformers.AutoConfig.from_pretrained(
            files.path, trust_remote_code=trust_remote_code, local_files_only=True
        )


def _architecture(config: Any, trust_remote_code: bool) -> Any:
    """The class of the model, found by building one without memory, if all it remembers is keys and values."""
    if config.is_encoder_decoder:  # asked first: classes that are the decoder alone change it
        raise UnsupportedModel(foreign.ENCODER_DECODER)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    if model._is_stateful:
        raise UnsupportedModel(foreign.STATEFUL)
    if not model._can_set_attn_implementation():
        raise UnsupportedModel("its attention implementation cannot be replaced")
    if unknown := set(getattr(model.base_model.config, "layer_types", None) or []) - {FULL, SLIDING}:
        raise UnsupportedModel(f"it has layers of the type '{min(unknown)}'")
    return type(model)


def _from_files(
    architecture: Any, files: ModelFiles, config: Any, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    model, report = architecture.from_pretrained(
        files.path,
        config=config,
        dtype=dtype,
        device_map={"": device},
        attn_implementation=NAME,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    # transformers makes up what it does not find, and goes on.
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise ModelFileError(f"the checkpoint has no tensor '{wrong[0]}' of the right shape")
    if report["unexpected_keys"]:
        logger.warning("Tensors that the model does not have: %s", ", ".join(sorted(report["unexpected_keys"])[:3]))
    found: torch.nn.Module = model
    return found


@contextmanager
def _naming(model_type: str) -> Iterator[None]:
    """Whatever is wrong is about this model; of an error that is not ours the first line is worth showing."""
    try:
        yield
    except UnsupportedModel as error:
        raise foreign.unsupported(model_type, f"transformers has it, but {error}") from None
    except (ModelFileError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise foreign.unsupported(model_type, f"transformers fails with {type(error).__name__}: {reason}") from None
