"""Tiny random checkpoints of the first open families, from GPT-2 to StarCoder2, as transformers writes them and as
their publishers did: under other names, in other layouts, with buffers that no model reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.oracle import oracle_logits
from tests.tiny_models import write_tokenizer

Tensors = dict[str, torch.Tensor]
# The checkpoint as transformers has it, beside one that transformers cannot read.
ORACLE = "transformers"


def write(folder: Path, model_type: str, settings: dict[str, Any], changes: dict[str, Any], seed: int = 0) -> Path:
    """Every parameter is random: transformers begins with biases of 0 and norms of 1, which would hide mistakes.

    `changes` may have a `spread`, the deviation of each from its mean.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    common: dict[str, Any] = dict(vocab_size=320, bos_token_id=1, eos_token_id=2)
    chosen = {**common, "spread": 0.3, **settings, **changes}
    spread = chosen.pop("spread")
    config = AutoConfig.for_model(model_type, **chosen)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith(".weight")
            parameter.normal_(1.0 if is_norm else 0.0, spread, generator=generator)
            if parameter.dim() == 2:
                # Activations without a gate are positive on average; if that came through, all tokens would look alike.
                parameter -= parameter.mean(0) + parameter.mean(1, keepdim=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def tiny_bloom(folder: Path, **changes: Any) -> Path:
    return write(folder, "bloom", dict(hidden_size=96, n_layer=3, n_head=6), changes)


def tiny_opt(folder: Path, **changes: Any) -> Path:
    settings = dict(
        hidden_size=80, ffn_dim=144, num_hidden_layers=3, num_attention_heads=5, max_position_embeddings=256
    )
    return write(folder, "opt", settings, changes)


def tiny_gpt_neox(folder: Path, **changes: Any) -> Path:
    settings = dict(
        hidden_size=144, intermediate_size=200, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=256,
        spread=0.25,
    )  # fmt: skip
    return write(folder, "gpt_neox", settings, changes)


def tiny_gpt_bigcode(folder: Path, **changes: Any) -> Path:
    return write(folder, "gpt_bigcode", dict(n_embd=96, n_inner=136, n_layer=3, n_head=6, n_positions=256), changes)


def tiny_falcon(folder: Path, **changes: Any) -> Path:
    """The layout of the 7B."""
    settings = dict(hidden_size=96, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=256)
    return write(folder, "falcon", settings, changes)


def tiny_mpt(folder: Path, **changes: Any) -> Path:
    return write(folder, "mpt", dict(d_model=80, n_layers=3, n_heads=5, max_seq_len=256), changes)


def tiny_gpt2(folder: Path, **changes: Any) -> Path:
    return write(folder, "gpt2", dict(n_embd=80, n_layer=3, n_head=5, n_positions=256), changes)


def tiny_gptj(folder: Path, **changes: Any) -> Path:
    settings = dict(n_embd=120, n_inner=200, n_layer=3, n_head=5, n_positions=256, rotary_dim=8, spread=0.25)
    return write(folder, "gptj", settings, changes)


def tiny_starcoder2(folder: Path, **changes: Any) -> Path:
    settings = dict(
        hidden_size=96, intermediate_size=136, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        max_position_embeddings=256, sliding_window=24,
    )  # fmt: skip
    return write(folder, "starcoder2", settings, changes)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors], target: Path | None = None) -> Path:
    """The checkpoint of `folder` with other tensors, in place or in `target`."""
    tensors = change(load_file(folder / "model.safetensors"))
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, (target or folder) / "model.safetensors", metadata={"format": "pt"})
    return target or folder


def bare(make: Callable[..., Path], prefix: str, buffers: tuple[str, ...] = ()) -> Callable[..., Path]:
    """Checkpoints of the model without its head: names without `prefix`, and the causal masks that some layers kept."""

    def old(folder: Path, **changes: Any) -> Path:
        masks = {name: torch.ones(1, 1, 4, 4) for name in buffers}
        return rewrite(
            make(folder, **changes), lambda ts: {**{k.removeprefix(prefix): t for k, t in ts.items()}, **masks}
        )

    return old


def with_own_head(make: Callable[..., Path], embedding: str) -> Callable[..., Path]:
    """A tied model whose file has the head nevertheless: a copy, as old versions of torch saved it."""

    def copied(folder: Path, **changes: Any) -> Path:
        return rewrite(make(folder, **changes), lambda ts: {**ts, "lm_head.weight": ts[embedding]})

    return copied


def tiny_santacoder(folder: Path, **changes: Any) -> Path:
    """SantaCoder as first published: a GPT-2 by name and by layout, with queries apart from the one key head."""
    plain = tiny_gpt_bigcode(folder / ORACLE, **changes)
    write_tokenizer(folder)
    config = json.loads((plain / "config.json").read_text())
    for key in ("multi_query", "architectures"):
        del config[key]
    config.update(model_type="gpt2", attention_head_type="multiquery")
    (folder / "config.json").write_text(json.dumps(config))
    hidden = config["n_embd"]

    def change(tensors: Tensors) -> Tensors:
        split: Tensors = {}
        for name, tensor in tensors.items():
            if ".c_attn." in name:
                split[name.replace("c_attn", "q_attn")] = tensor[:hidden]
                split[name.replace("c_attn", "kv_attn")] = tensor[hidden:]
            else:
                split[name] = tensor
        linears = ("attn.weight", ".c_proj.weight", ".c_fc.weight")
        return {name: tensor.t() if name.endswith(linears) else tensor for name, tensor in split.items()}

    return rewrite(plain, change, folder)


def tiny_refined_web(folder: Path, **changes: Any) -> Path:
    """Falcon 40B's config.json from before transformers had the architecture."""
    plain = tiny_falcon(folder / ORACLE, new_decoder_architecture=True, num_kv_heads=2, **changes)
    config = json.loads((plain / "config.json").read_text())
    for key in ("new_decoder_architecture", "ffn_hidden_size", "rope_parameters", "num_ln_in_parallel_attn"):
        config.pop(key, None)
    for new, old in dict(num_attention_heads="n_head", num_hidden_layers="n_layer", num_kv_heads="n_head_kv").items():
        config[old] = config.pop(new)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "RefinedWeb"}))
    return rewrite(plain, lambda tensors: tensors, folder)


def oracle_beside(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    return oracle_logits(folder / ORACLE, sequences)


def falcon_rw_oracle(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """With torch's attention, which is transformers' default: its plain one adds Falcon's ALiBi twice."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        return [model(torch.tensor([sequence]), use_cache=False).logits[0] for sequence in sequences]
