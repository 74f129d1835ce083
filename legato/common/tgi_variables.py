"""TGI's environment variables that are no option of Legato: used under another name, or reported once.

A variable that an operator sets and nobody reads is worse than an error: each program warns of those in `NO_EFFECT`.
The launcher does not pass them on, so that one start has one warning.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

_ALWAYS_SO = frozenset({"1", "true", "yes", "on"})
_NO_EXLLAMA = "GPTQ weights run on Legato's own kernels"
_NO_SUCH_DEVICE = "Legato runs on CPUs and NVIDIA GPUs; `--num-shard` sets the number of shards"

# Why a variable has no effect.
NO_EFFECT = {
    "ATTENTION": "Legato has one implementation of attention for every device",
    "TGI_WIGGLE_ROOM": "memory is measured; `--cuda-memory-fraction` limits it",
    "DISABLE_EXLLAMA": _NO_EXLLAMA,
    "EXLLAMA_VERSION": _NO_EXLLAMA,
    "XPU_MEMORY_FRACTION": _NO_SUCH_DEVICE,
    "ZE_AFFINITY_MASK": _NO_SUCH_DEVICE,
    "ASCEND_RT_VISIBLE_DEVICES": _NO_SUCH_DEVICE,
    "ROCM_USE_FLASH_ATTN_V2_TRITON": _NO_SUCH_DEVICE,
    "ROCM_USE_CUSTOM_PAGED_ATTN": _NO_SUCH_DEVICE,
    "ROCM_USE_SKINNY_GEMM": _NO_SUCH_DEVICE,
}
# What these ask for is always so; only the opposite is worth a warning.
ALWAYS_ON = {
    "PREFILL_CHUNKING": "long prompts are always computed in chunks; `--max-batch-prefill-tokens` sets their size",
    "USE_FLASH_ATTENTION": "attention is always paged; `--disable-custom-kernels` turns the kernels off",
    "REQUEST_LOGPROBS": "log probabilities are computed where a request asks for them",
}


def variable_warnings(environ: Mapping[str, str]) -> list[str]:
    """One line for each variable of TGI that is set and does nothing."""
    idle = {name: why for name, why in NO_EFFECT.items() if environ.get(name)}
    idle |= {name: why for name, why in ALWAYS_ON.items() if (environ.get(name) or "1").lower() not in _ALWAYS_SO}
    return [f"{name} has no effect: {why}" for name, why in idle.items()]


def without_idle(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process whose parent has warned already."""
    return {name: value for name, value in environ.items() if name not in NO_EFFECT and name not in ALWAYS_ON}


def adopt_token(environ: MutableMapping[str, str]) -> None:
    """TGI's launcher takes the Hub token from HF_API_TOKEN, too. huggingface_hub reads HF_TOKEN alone."""
    if (token := environ.get("HF_API_TOKEN")) and not environ.get("HF_TOKEN"):
        environ["HF_TOKEN"] = token
