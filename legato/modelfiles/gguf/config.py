"""GGUF metadata as config.json, generation_config.json and tokenizer_config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.modelfiles.gguf.file import GgmlType, GgufFile
from legato.modelfiles.gguf.tokenizer import GgufVocabulary
from legato.modelfiles.vocabularies.sentencepiece import TokenType

if TYPE_CHECKING:
    import numpy as np

# Larger than any model; limits what a malformed file can allocate.
MAX_LAYERS = 4096
MAX_SIZE = 1 << 31

# RoPE scaling of Llama 3.1 and later; only the factor differs between models.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Tokens that end the assistant's turn in common chat formats. Files with a single end-of-sequence token often name the
# one that ends a document, which a chat model never generates.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>")


@dataclass(frozen=True, slots=True)
class Family:
    """The Hugging Face equivalent of a GGUF architecture. `optional` maps GGUF keys to config.json keys."""

    model_type: str
    architecture: str
    fixed: dict[str, Any] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)
    # Interleaved sliding window: every n-th layer has full attention. 0: all layers are alike.
    full_attention_every: int = 0


_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", {"hidden_act": "silu"}),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", {"hidden_act": "silu"}),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {"hidden_act": "silu"}),
    "qwen2moe": Family("qwen2_moe", "Qwen2MoeForCausalLM", {"hidden_act": "silu", "norm_topk_prob": False}, _EXPERTS),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", {"hidden_act": "silu", "norm_topk_prob": True}, _EXPERTS),
    "gemma": Family("gemma", "GemmaForCausalLM", _GEMMA),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA,
        {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
        full_attention_every=2,
    ),
    "gemma3": Family(
        "gemma3_text", "Gemma3ForCausalLM", {**_GEMMA, "rope_local_base_freq": 10_000.0}, full_attention_every=6
    ),
    "phi3": Family("phi3", "Phi3ForCausalLM", {"hidden_act": "silu"}),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", {"hidden_act": "silu"}),
    "granite": Family("granite", "GraniteForCausalLM", {"hidden_act": "silu"}, _FACTORS),
    # All published models have this window, but their files do not contain it.
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": 4096},
    ),
}
_MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    {"hidden_act": "silu"},
    {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
)


class _Keys:
    """Access to the keys `<architecture>.*`, with errors that name the file and the key."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf
        self.architecture = str(gguf.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        raise ModelFileError(f"{self.gguf.path}: {self.architecture}.{key} must be a number, not {value!r}")

    def count(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A size. Values per layer must be equal for all layers."""
        value = self.get(key, default)
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                raise UnsupportedModel(f"{self.gguf.path}: {self.architecture}.{key} differs from layer to layer")
            value = value[0]
        if isinstance(value, int) and 0 < value <= most:
            return value
        raise ModelFileError(f"{self.gguf.path}: {self.architecture}.{key} must be between 1 and {most}, not {value!r}")


def config_of(gguf: GgufFile) -> dict[str, Any]:
    keys = _Keys(gguf)
    family = _family_of(keys)
    num_layers = keys.count("block_count", most=MAX_LAYERS)
    num_heads = keys.count("attention.head_count")
    hidden_size = keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": _vocab_size(gguf),
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "torch_dtype": _dtype_of(gguf),
        **_norm(keys),
        **_rope(keys, head_dim),
        **family.fixed,
        **_attention_window(keys, family, num_layers),
        **{name: keys.get(key) for key, name in family.optional.items() if keys.get(key) is not None},
        **{f"{role}_token_id": gguf.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")},
        "pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if family.full_attention_every:
        config["query_pre_attn_scalar"] = _query_scale(config)
    return config


def generation_config_of(gguf: GgufFile) -> dict[str, Any]:
    return {
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(gguf),
        "pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def tokenizer_config_of(gguf: GgufFile) -> dict[str, Any]:
    vocabulary = GgufVocabulary.of(gguf)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {f"{name}_token": vocabulary.special(role) for name, role in roles.items()}
    config["add_bos_token"] = vocabulary.add_bos
    config["add_eos_token"] = vocabulary.add_eos
    config["model_max_length"] = _Keys(gguf).count("context_length")
    template = gguf.metadata.get("tokenizer.chat_template")
    named = {name: gguf.metadata.get(f"tokenizer.chat_template.{name}") for name in _template_names(gguf)}
    if named:
        named = {"default": template, **named}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items() if text]
    elif template:
        config["chat_template"] = template
    return config


def _family_of(keys: _Keys) -> Family:
    if keys.architecture == "llama" and keys.get("expert_count"):
        return _MIXTRAL
    if keys.architecture == "olmo2" and keys.get("attention.sliding_window") is not None:
        raise UnsupportedModel(f"{keys.gguf.path}: OLMo 3, which uses the architecture name olmo2, is not supported")
    family = _FAMILIES.get(keys.architecture)
    if family is None:
        raise UnsupportedModel(
            f"{keys.gguf.path}: the GGUF architecture '{keys.architecture}' is not supported; "
            f"supported: {', '.join(_FAMILIES)}"
        )
    return family


def _vocab_size(gguf: GgufFile) -> int:
    """The number of rows of the embedding, which may exceed the number of tokens."""
    embedding = gguf.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding is not None else len(GgufVocabulary.of(gguf).tokens)


def _dtype_of(gguf: GgufFile) -> str:
    """The dtype to compute in. Most quantized models were trained in bfloat16, and Gemma overflows in float16."""
    types = {tensor.type for tensor in gguf.tensors.values()}
    if types == {GgmlType.F32}:
        return "float32"
    return "float16" if types == {GgmlType.F32, GgmlType.F16} or types == {GgmlType.F16} else "bfloat16"


def _norm(keys: _Keys) -> dict[str, Any]:
    if keys.get("attention.layer_norm_rms_epsilon") is not None:
        return {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}
    return {"norm_epsilon": keys.number("attention.layer_norm_epsilon", 1e-5)}


def _attention_window(keys: _Keys, family: Family, num_layers: int) -> dict[str, Any]:
    if keys.get("attention.sliding_window") is None:
        return {}
    window: dict[str, Any] = {"sliding_window": keys.count("attention.sliding_window")}
    if every := family.full_attention_every:
        layers = range(1, num_layers + 1)
        window["layer_types"] = ["sliding_attention" if layer % every else "full_attention" for layer in layers]
    return window


def _query_scale(config: dict[str, Any]) -> float:
    """Gemma scales by the head dimension, but its 27B models (recognized by their depth) by another one."""
    largest = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    if config["num_hidden_layers"] == largest:
        return float(config["hidden_size"] // config["num_attention_heads"])
    return float(config["head_dim"])


def _rope(keys: _Keys, head_dim: int) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10_000.0)
    scaling = _scaling_by_tensor(keys, head_dim, theta) or _scaling_by_key(keys)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if scaling and "original_max_position_embeddings" in scaling and scaling["rope_type"] == "longrope":
        rope["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return rope


def _scaling_by_key(keys: _Keys) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{keys.gguf.path}: the rope scaling '{kind}' is not supported; supported: linear, yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if keys.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = keys.count("rope.scaling.original_context_length")
    return scaling


def _scaling_by_tensor(keys: _Keys, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Some files have the divisor of every frequency as a tensor, but not the scaling parameters."""
    short, long = (_small_tensor(keys.gguf, f"rope_factors_{length}.weight") for length in ("short", "long"))
    if short is not None and long is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
            "attention_factor": keys.get("rope.scaling.attn_factor"),
        }
    divisors = _small_tensor(keys.gguf, "rope_freqs.weight")
    if divisors is None:
        return None
    import numpy as np  # most files have no such tensor

    factor = float(divisors.max())
    if divisors.shape == (head_dim // 2,) and np.allclose(
        divisors, _llama3_divisors(factor, head_dim, theta), rtol=1e-3
    ):
        return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    raise UnsupportedModel(f"{keys.gguf.path}: the frequencies in rope_freqs.weight are not those of Llama 3")


def _small_tensor(gguf: GgufFile, name: str) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type is not GgmlType.F32:
        raise UnsupportedModel(f"{gguf.path}: tensor '{name}' must have type F32, not {tensor.type.name}")
    return gguf.raw(name).view("<f4")


def _llama3_divisors(factor: float, head_dim: int, theta: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Llama 3 scaling: high frequencies are kept, low ones divided by `factor`, those between interpolated."""
    context, low, high = (
        LLAMA3_ROPE[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    import numpy as np

    with np.errstate(all="ignore"):  # an invalid theta or factor gives divisors that match nothing
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        blend = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
        return np.asarray(1 / ((1 - blend) / factor + blend))


def _eos_token_ids(gguf: GgufFile) -> list[int]:
    vocabulary = GgufVocabulary.of(gguf)
    ids = [vocabulary.special_id(role) for role in ("eos", "eot", "eom")]
    if "tokenizer.chat_template" in gguf.metadata:
        by_token = vocabulary.ids()
        ends = [by_token[token] for token in TURN_ENDS if token in by_token]
        whole = (TokenType.CONTROL, TokenType.USER_DEFINED)
        ids += [token_id for token_id in ends if vocabulary.types[token_id] in whole]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _template_names(gguf: GgufFile) -> list[str]:
    names = gguf.metadata.get("tokenizer.chat_templates")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
