"""The options of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from legato.common.option import Options, option


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(Options):
    """LoRA adapters"""

    lora_adapters: str | None = option(
        None,
        "LoRA adapters to load, comma-separated: `id`, `id@revision`, `name=/path`. Requests select one by its id or"
        " name, with `adapter_id` or, on `/v1` routes, with `model`.",
    )
    lora_device_ranks: int | None = option(
        None,
        "Device memory for adapters, as a total rank: adapters with this total rank are on the device at once; the"
        " others stay in host memory until a request needs them. Default: the total rank of `--lora-adapters`, limited"
        " to the range 256 to 1024.",
        minimum=8,
    )
    lora_max_rank: int | None = option(
        None,
        "Maximum rank of an adapter. Default: the highest rank of `--lora-adapters`, at least 64.",
        minimum=1,
        maximum=256,
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "Layers that adapters may change, by the last part of their names, comma-separated: `q_proj,v_proj,lm_head`;"
        " `experts` means MoE experts. Fewer layers take less memory. Default: the layers that `--lora-adapters`"
        " change and, with `--lora-allow-runtime`, all linear layers except experts and `lm_head`.",
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeAdapterOptions(Options):
    """LoRA adapters at run time"""

    lora_allow_runtime: bool = option(
        False,
        "Allow loading and unloading adapters while the server runs, with `POST /v1/load_lora_adapter` and"
        " `/v1/unload_lora_adapter`, for API keys whose line in `--api-key-file` has `adapters`; without API keys, for"
        " programs on this machine.",
    )
    lora_allow: tuple[str, ...] = option(
        (),
        "Allowed sources of adapters at run time, comma-separated: folders, and Hub repositories as `owner/name` or"
        " `owner/*`. Default: none.",
    )
