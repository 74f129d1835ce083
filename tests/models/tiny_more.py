"""Tiny random checkpoints of families that came between the seeds and today's, and of those that few have: written by
transformers, or, where it does not know them, from what it does know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny_experts import COMMON, STRETCH
from tests.models.tiny_seeds import ORACLE, Tensors, rewrite, write
from tests.tiny_models import write_tokenizer

GROUPED: dict[str, Any] = dict(
    hidden_size=96, intermediate_size=130, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=256, pad_token_id=0, spread=0.2,
)  # fmt: skip


def tiny_cohere(folder: Path, **changes: Any) -> Path:
    return write(folder, "cohere", dict(GROUPED, logit_scale=0.3), changes)


def tiny_cohere2(folder: Path, **changes: Any) -> Path:
    return write(folder, "cohere2", dict(GROUPED, num_hidden_layers=4, sliding_window=20, logit_scale=0.3), changes)


def tiny_phi(folder: Path, **changes: Any) -> Path:
    return write(folder, "phi", dict(GROUPED, num_key_value_heads=6), changes)


def tiny_phimoe(folder: Path, **changes: Any) -> Path:
    settings = dict(COMMON, num_local_experts=5, attention_bias=True, lm_head_bias=True, router_jitter_noise=0.2)
    return write(folder, "phimoe", settings, changes)


def tiny_olmo(folder: Path, **changes: Any) -> Path:
    return write(folder, "olmo", dict(GROUPED, clip_qkv=0.8), changes)


def tiny_olmo3(folder: Path, **changes: Any) -> Path:
    rope = {"full_attention": {key: value for key, value in STRETCH.items() if "mscale" not in key},
            "sliding_attention": dict(rope_type="default", rope_theta=10_000.0)}  # fmt: skip
    settings = dict(GROUPED, num_hidden_layers=4, sliding_window=20, rope_parameters=rope)
    return write(folder, "olmo3", settings, changes)


def tiny_dbrx(folder: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = dict(
        d_model=96, n_heads=6, n_layers=3, max_seq_len=256, spread=0.2,
        attn_config=dict(clip_qkv=0.8, kv_n_heads=2, rope_theta=5000.0),
        ffn_config=dict(ffn_hidden_size=68, moe_num_experts=5, moe_top_k=3),
        rope_parameters=dict(rope_type="default", rope_theta=5000.0),
    )  # fmt: skip
    return write(folder, "dbrx", settings, changes)


def tiny_deepseek_v3(folder: Path, **changes: Any) -> Path:
    settings = dict(
        COMMON, num_key_value_heads=6, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=44, n_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=1.5, n_group=4, topk_group=2, rope_parameters=STRETCH,
    )  # fmt: skip

    def corrected(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(1)
        return {
            name: torch.randn(tensor.shape, generator=generator) * 0.2 if "correction" in name else tensor
            for name, tensor in tensors.items()
        }

    return rewrite(write(folder, "deepseek_v3", settings, changes), corrected)


def tiny_gpt_oss(folder: Path, **changes: Any) -> Path:
    """Some gates are beyond the limit."""
    stretch = {key: value for key, value in STRETCH.items() if "mscale" not in key} | {"truncate": False}
    settings = dict(COMMON, intermediate_size=64, head_dim=16, num_local_experts=5, num_experts_per_tok=3,
                    sliding_window=20, swiglu_limit=1.5, rope_parameters=stretch, pad_token_id=0)  # fmt: skip
    return write(folder, "gpt_oss", settings, changes)


def tiny_gpt_oss_mxfp4(folder: Path, **changes: Any) -> Path:
    """As published. The oracle reads what the codes stand for."""
    plain = tiny_gpt_oss(folder / ORACLE, **changes)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    exact: Tensors = {}
    stored: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_coded = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        exact[name] = tensor
        if is_coded:
            blocks, scales, values = mxfp4(tensor.transpose(1, 2))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            exact[name] = values.transpose(1, 2).contiguous()
        else:
            stored[name] = tensor
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[experts, N, K] -> blocks [experts, N, K/32, 16] and scales [experts, N, K/32], and what they stand for."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    grouped = values.unflatten(-1, (-1, 32))
    exponents = (grouped.abs().amax(-1) / 6).log2().ceil()
    codes = (grouped / exponents.exp2()[..., None]).unsqueeze(-1).sub(numbers).abs().argmin(-1)
    exact = numbers[codes] * exponents.exp2()[..., None]
    pairs = codes.unflatten(-1, (16, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).byte(), (exponents + 127).byte(), exact.flatten(-2)


def tiny_gpt_neo(folder: Path, **changes: Any) -> Path:
    settings = dict(hidden_size=80, num_layers=4, num_heads=5, max_position_embeddings=256, window_size=20, spread=0.2,
                    attention_types=[[["global", "local"], 2]])  # fmt: skip
    return write(folder, "gpt_neo", settings, changes)


def tiny_xglm(folder: Path, **changes: Any) -> Path:
    settings = dict(d_model=96, ffn_dim=136, num_layers=3, attention_heads=6, max_position_embeddings=256, spread=0.2)
    return write(folder, "xglm", settings, changes)


def tiny_codegen(folder: Path, **changes: Any) -> Path:
    settings = dict(n_embd=96, n_inner=136, n_layer=3, n_head=8, n_positions=256, rotary_dim=8, spread=0.25,
                    tie_word_embeddings=False)  # fmt: skip
    return write(folder, "codegen", settings, changes)


def tiny_baichuan(folder: Path, **changes: Any) -> Path:
    """The 7B: what transformers calls a Llama, with its projections in one matrix."""
    plain = write(folder / ORACLE, "llama", dict(GROUPED, num_key_value_heads=6), changes)
    config = json.loads((plain / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("rope_parameters", "num_key_value_heads")}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "baichuan"}))
    write_tokenizer(folder)
    return rewrite(plain, _packed, folder)


def tiny_baichuan_13b(folder: Path, **changes: Any) -> Path:
    """Without rotation: `model_max_length` in place of the number of positions."""
    tiny_baichuan(folder, hidden_size=128, num_attention_heads=8, num_key_value_heads=8, **changes)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["model_max_length"] = config.pop("max_position_embeddings")
    file.write_text(json.dumps(config))
    return folder


def alibi_oracle(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The same Llama without rotation (every position is 0) and with ALiBi in its mask."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / ORACLE, attn_implementation="eager").eval()
    slopes = 2.0 ** -torch.arange(1, 9)
    found = []
    for sequence in sequences:
        place = torch.arange(len(sequence))
        distance = place - place[:, None]
        mask = (slopes[:, None, None] * distance).masked_fill(distance > 0, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            out = model(torch.tensor([sequence]), attention_mask=mask[None], position_ids=torch.zeros_like(place)[None],
                        use_cache=False)  # fmt: skip
        found.append(out.logits[0])
    return found


def _packed(tensors: Tensors) -> Tensors:
    done = {name: tensor for name, tensor in tensors.items() if "self_attn" not in name or "o_proj" in name}
    for name in tensors:
        if name.endswith("q_proj.weight"):
            place = name.removesuffix("q_proj.weight")
            done[f"{place}W_pack.weight"] = torch.cat([tensors[f"{place}{part}_proj.weight"] for part in "qkv"])
    return done


def tiny_bart(folder: Path, **changes: Any) -> Path:
    return _encoder_decoder("Bart", folder, changes)


def tiny_pegasus(folder: Path, **changes: Any) -> Path:
    return _encoder_decoder("Pegasus", folder, changes)


def _encoder_decoder(family: str, folder: Path, changes: dict[str, Any]) -> Path:
    import transformers

    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        vocab_size=320, d_model=72, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=6, encoder_ffn_dim=96, decoder_ffn_dim=130, max_position_embeddings=256,
        scale_embedding=True, init_std=0.2, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        forced_eos_token_id=None,
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**{**settings, **changes})
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
