"""Which class serves which `model_type`, and how a model is put together from its files."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import replace
from types import ModuleType
from typing import Protocol, runtime_checkable

import torch

from legato.common.errors import ModelFileError, OptionError, UnsupportedModel
from legato.layers.kv_cache import KVCache, KVShape
from legato.layers.shard import Shard
from legato.layers.step import Step
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.merged import MergedModel
from legato.models import checkpoint
from legato.models.checkpoint import Progress
from legato.models.config import ModelConfig
from legato.models.dummy import DummyWeights
from legato.models.gguf_reader import GgufFormReader, GgufReader
from legato.models.gguf_source import GgufSource
from legato.models.merge import MergedSource
from legato.models.methods import find_method, on_load
from legato.models.sources import SafetensorsSource, TensorSource
from legato.models.targets import AdapterTarget
from legato.models.weights import Weights
from legato.quantization.fp8_copies import keep_fp8_copies
from legato.quantization.method import DENSE

logger = logging.getLogger(__name__)

ARCHITECTURES = {
    "bart": "legato.models.bart:Bart",
    "bloom": "legato.models.bloom:Bloom",
    "baichuan": "legato.models.baichuan:Baichuan",
    "codegen": "legato.models.gptj:CodeGen",
    "cohere": "legato.models.cohere:Cohere",
    "cohere2": "legato.models.cohere:Cohere2",
    "dbrx": "legato.models.dbrx:Dbrx",
    "deepseek_v2": "legato.models.deepseek:Deepseek",
    "deepseek_v3": "legato.models.deepseek:DeepseekV3",
    "falcon": "legato.models.falcon:Falcon",
    "gemma": "legato.models.gemma:Gemma",
    "gemma2": "legato.models.gemma:Gemma2",
    "gemma3": "legato.models.gemma_vision:Gemma3WithImages",
    "gemma3_text": "legato.models.gemma:Gemma3",
    "gpt2": "legato.models.gpt2:GPT2",
    "gpt_bigcode": "legato.models.gpt2:GPTBigCode",
    "gpt_neo": "legato.models.gpt_neo:GPTNeo",
    "gpt_neox": "legato.models.gpt_neox:GPTNeoX",
    "gpt_oss": "legato.models.gpt_oss:GptOss",
    "gptj": "legato.models.gptj:GPTJ",
    "granite": "legato.models.granite:Granite",
    "idefics": "legato.models.idefics:Idefics",
    "idefics2": "legato.models.idefics2:Idefics2",
    "idefics3": "legato.models.idefics3:Idefics3",
    "llama": "legato.models.llama:Llama",
    "llama4": "legato.models.llama4:Llama4WithImages",
    "llama4_text": "legato.models.llama4:Llama4",
    "llava_next": "legato.models.llava_next:LlavaNext",
    "mamba": "legato.models.mamba:Mamba",
    "mistral": "legato.models.llama:Mistral",
    "mixtral": "legato.models.mixtral:Mixtral",
    "mllama": "legato.models.mllama:Mllama",
    "mpt": "legato.models.mpt:MPT",
    "mt5": "legato.models.t5:MT5",
    "olmo": "legato.models.olmo2:Olmo",
    "olmo2": "legato.models.olmo2:Olmo2",
    "olmo3": "legato.models.olmo2:Olmo3",
    "opt": "legato.models.opt:OPT",
    "paligemma": "legato.models.gemma_vision:PaliGemma",
    "pegasus": "legato.models.bart:Pegasus",
    "phi": "legato.models.phi:Phi",
    "phi3": "legato.models.llama:Phi3",
    "phimoe": "legato.models.phi:PhiMoe",
    "qwen2": "legato.models.qwen:Qwen2",
    "qwen2_vl": "legato.models.qwen2_vl:Qwen2VL",
    "qwen2_5_vl": "legato.models.qwen2_5_vl:Qwen25VL",
    "qwen2_moe": "legato.models.qwen_moe:Qwen2Moe",
    "qwen3": "legato.models.qwen:Qwen3",
    "qwen3_5": "legato.models.qwen_next:Qwen35",
    "qwen3_5_moe": "legato.models.qwen_next:Qwen35Moe",
    "qwen3_5_moe_text": "legato.models.qwen_next:Qwen35Moe",
    "qwen3_5_text": "legato.models.qwen_next:Qwen35",
    "qwen3_moe": "legato.models.qwen_moe:Qwen3Moe",
    "qwen3_next": "legato.models.qwen_next:Qwen3Next",
    "qwen3_vl": "legato.models.qwen3_vl:Qwen3VL",
    "RefinedWeb": "legato.models.falcon:Falcon",
    "RefinedWebModel": "legato.models.falcon:Falcon",
    "smolvlm": "legato.models.idefics3:Idefics3",
    "starcoder2": "legato.models.starcoder2:Starcoder2",
    "t5": "legato.models.t5:T5",
    "xglm": "legato.models.xglm:XGLM",
}

# For all others, if these packages are installed.
FALLBACK = "legato.models.fallback"
FOREIGN = "legato.models.foreign"
FALLBACK_NEEDS = ("transformers", "accelerate")


class CausalModel(Protocol):
    """What the engine needs of an architecture. Its constructor takes `(config: ModelConfig, weights: Weights)`."""

    config: ModelConfig
    kv_shape: KVShape  # of this shard
    can_capture: bool  # whether a decode may become a CUDA graph

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        """Hidden states [m, hidden_size] of the tokens of the step whose logits are wanted, the same on every shard."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden_size] -> [m, vocab_size], on every shard. Takes the final norm with it: most tokens need none."""
        ...


@runtime_checkable
class LimitedModel(CausalModel, Protocol):
    """A `CausalModel` that may compute otherwise where sequences can be long."""

    def limit(self, longest: int) -> None:
        """No sequence will have more tokens. The server calls it before the first one, while the cache is empty."""
        ...


@runtime_checkable
class GreedyModel(CausalModel, Protocol):
    """A `CausalModel` with a faster way to the likeliest tokens than the sampler's."""

    def likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [m, vocab_size] -> token ids [m] int64, of equal ones the lowest, and their log probabilities [m]
        float32, NaN where a row is not finite."""
        ...


def get_model(
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shard: Shard | None = None,
    dummy: bool = False,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    quantize: str | None = None,
    packs: bool = False,
    targets: list[AdapterTarget] | None = None,
    fp8_copy_fraction: float = 0.0,
) -> CausalModel:
    """Build this shard of the model that `config` describes and fill it from `files`. `quantize` is the method that
    was asked for; `packs` is for a CPU: matrices are packed; `targets` gets the layers that adapters may change;
    `fp8_copy_fraction` is that of free device memory which copies of 4-bit matrices may take."""
    if config.model_type not in ARCHITECTURES:
        fallback = _fallback(files, trust_remote_code)
        if quantize is not None or files.quantization() is not None:
            raise UnsupportedModel(f"model_type '{config.model_type}' runs through transformers, without quantization")
        other: CausalModel = fallback.load(files, config, dtype, device, shard, dummy, trust_remote_code)
        return other
    architecture = architecture_for(config.model_type)
    if dummy:
        method = DENSE if quantize is None else on_load(quantize)
        method = replace(method, num_layers=config.num_layers)
        made = DummyWeights(dtype, device, shard, method, packs)
        built: CausalModel = architecture(config, made)
        check_stages(built, made.shard)
        check_rope_option(config)
        _note_targets(targets, made)
        keep_fp8_copies(made.quantized, fp8_copy_fraction)
        return built
    source = open_source(files)
    method = replace(find_method(files, source, quantize), num_layers=config.num_layers)
    gguf = _gguf_reader(source, device, shard, packs) if quantize is None else None
    if gguf is not None:
        method = replace(method, name="gguf", reader=gguf)
    weights = Weights(source, dtype, device, shard, progress, method, packs)
    try:
        model: CausalModel = architecture(config, weights)
        weights.check_all_used()
        check_stages(model, weights.shard)
    except ModelFileError as error:
        check_rope_option(config)  # tables of positions are not as long as the option says
        raise ModelFileError(f"{files.path}: {error}") from None
    check_rope_option(config)
    _note_targets(targets, weights)
    if weights.kinds:
        logger.info("Quantized weights", extra={"fields": {"method": method.name, "layers": dict(weights.kinds)}})
    if isinstance(gguf, GgufFormReader) and gguf.dense_matrices:
        logger.info("Dense matrices of the GGUF file", extra={"fields": {"types": gguf.dense_matrices}})
    keep_fp8_copies(weights.quantized, fp8_copy_fraction)
    return model


def _gguf_reader(
    source: TensorSource, device: torch.device, shard: Shard | None, packs: bool
) -> GgufReader | GgufFormReader | None:
    """None where matrices of a GGUF file become dense, or it is none."""
    if not isinstance(source, GgufSource):
        return None
    if packs:
        return GgufReader(source) if shard is None or shard.world_size == 1 else None
    return None if device.type in checkpoint.DEQUANTIZED_ON else GgufFormReader(source, device)


def check_stages(model: CausalModel, shard: Shard) -> None:
    """UnsupportedModel if a stage of a pipeline was asked for and the family builds and runs its layers otherwise."""
    if shard.num_stages == 1:
        return
    from legato.models.decoder import Decoder  # which imports the protocol of this module's models

    num_layers = len(shard.layers(model.config.num_layers))
    is_plain = isinstance(model, Decoder) and type(model).forward is Decoder.forward
    if not (is_plain and isinstance(model, Decoder) and len(model.layers) == num_layers > 0):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be divided into {shard.num_stages} pipeline stages"
            " (--pipeline-parallel-size)"
        )


def check_rope_option(config: ModelConfig) -> None:
    """Of a model that was built with this configuration."""
    if config.rope_option is not None and not config.ropes:
        raise OptionError(f"--rope-scaling: model_type '{config.model_type}' has no rotary embedding to scale")


def _note_targets(targets: list[AdapterTarget] | None, weights: Weights) -> None:
    if targets is not None:
        targets += weights.targets


def model_config(files: ModelFiles, *, trust_remote_code: bool = False) -> ModelConfig:
    """The normalised configuration, of a supported model type."""
    model_type = str(files.config().get("model_type"))
    if model_type in ARCHITECTURES:
        return ModelConfig.from_hf(files.config())
    config: ModelConfig = _fallback(files, trust_remote_code).model_config(files, trust_remote_code)
    return config


def architecture_for(model_type: str) -> type:
    module, _, name = ARCHITECTURES[model_type].partition(":")
    architecture: type = getattr(importlib.import_module(module), name)
    return architecture


def _fallback(files: ModelFiles, trust_remote_code: bool) -> ModuleType:
    """Imported for a model that needs it and for no other: it brings in transformers."""
    if any(importlib.util.find_spec(package) is None for package in FALLBACK_NEEDS):
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(
            f"model_type '{files.config().get('model_type')}' is not supported; supported: {known}. "
            "Many others run through transformers: pip install 'legato[transformers]'"
        )
    foreign = importlib.import_module(FOREIGN)
    foreign.check(files, trust_remote_code, foreign.Mentioned())
    return importlib.import_module(FALLBACK)


def open_source(files: ModelFiles) -> TensorSource:
    if isinstance(files, MergedModel):
        return MergedSource(open_source(files.base), files.path)
    if files.weight_format == "gguf":
        return GgufSource(files.weight_files()[0])
    return SafetensorsSource(files.weight_files())
