"""Every architecture against transformers: one shard and several, a ragged batch, tokens and logits.

An architecture joins with one line in CASES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny_experts as experts
from tests.models import tiny_hybrid as hybrid
from tests.models import tiny_llama4 as llama4
from tests.models import tiny_mamba as mamba
from tests.models import tiny_more as more
from tests.models import tiny_seeds as seeds
from tests.models import tiny_t5 as t5
from tests.models import tiny_today as today
from tests.models.answers import Answers, answer, prompts
from tests.models.mpt_reference import mpt_logits, tiny_mpt_with
from tests.models.oracle import oracle_logits
from tests.models.shards import ShardProcesses
from tests.tiny_models import tiny_llama

TOLERANCE = 2e-4


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[..., Path]  # of tests/tiny_models.py
    changes: dict[str, Any] = field(default_factory=dict)
    shards: tuple[int, ...] = (2,)  # besides 1
    oracle: Callable[[Path, list[list[int]]], list[torch.Tensor]] = oracle_logits
    start: tuple[int, ...] = ()  # what the decoder of an encoder-decoder model sees first
    is_variant: bool = False  # of another case: for `make test-shards` only


def t5_case(name: str, make: Callable[..., Path], **settings: Any) -> Case:
    return Case(name, make, oracle=t5.encoder_decoder_logits, start=(t5.START,), **settings)


CASES = [
    Case("llama", tiny_llama, shards=(2, 4)),
    Case("llama-odd-sizes", tiny_llama, dict(vocab_size=317, hidden_size=112, intermediate_size=131,
         num_attention_heads=7, num_key_value_heads=7), shards=(2, 3)),
    Case("llama-biases-tied", tiny_llama, dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    Case("bloom", seeds.tiny_bloom, shards=(2, 4)),
    Case("bloom-residual-behind-norm", seeds.tiny_bloom, dict(apply_residual_connection_post_layernorm=True)),
    Case("bloom-bare-names", seeds.bare(seeds.tiny_bloom, "transformer.")),
    Case("bloom-head-copied", seeds.with_own_head(seeds.tiny_bloom, "transformer.word_embeddings.weight")),
    Case("opt", seeds.tiny_opt),
    Case("opt-350m", seeds.tiny_opt, dict(do_layer_norm_before=False, word_embed_proj_dim=48, spread=0.2)),
    Case("opt-bare-names", seeds.bare(seeds.tiny_opt, "model.")),
    Case("opt-no-final-norm", seeds.tiny_opt, dict(_remove_final_layer_norm=True, spread=0.2)),
    Case("galactica", seeds.tiny_opt, dict(activation_function="gelu", enable_bias=False)),
    Case("galactica-bare-norms", seeds.tiny_opt, dict(activation_function="gelu", layer_norm_elementwise_affine=False)),
    Case("gpt-neox", seeds.tiny_gpt_neox, shards=(2, 4)),
    Case("gpt-neox-sequential", seeds.tiny_gpt_neox, dict(use_parallel_residual=False, attention_bias=False,
         rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=1.0))),
    Case("gpt-neox-old-names", seeds.bare(seeds.tiny_gpt_neox, "gpt_neox.", ("layers.0.attention.bias",
         "layers.0.attention.masked_bias")), dict(tie_word_embeddings=True)),
    Case("starcoder", seeds.tiny_gpt_bigcode, shards=(2, 4)),
    Case("starcoder-multi-head", seeds.tiny_gpt_bigcode, dict(multi_query=False, n_inner=None), shards=(2, 4)),
    Case("starcoder-bare-names", seeds.bare(seeds.tiny_gpt_bigcode, "transformer.", ("h.0.attn.bias",))),
    Case("santacoder-first", seeds.tiny_santacoder, oracle=seeds.oracle_beside),
    Case("falcon-7b", seeds.tiny_falcon, shards=(2, 4)),
    Case("falcon-40b", seeds.tiny_falcon, dict(new_decoder_architecture=True, num_kv_heads=3,
         tie_word_embeddings=False), shards=(2, 4)),
    Case("falcon-11b", seeds.tiny_falcon, dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
         ffn_hidden_size=200, bias=True)),
    # Eight heads: transformers rounds the penalties to bfloat16, where only powers of two stay what they are.
    Case("falcon-rw", seeds.tiny_falcon, dict(alibi=True, multi_query=False, parallel_attn=False, bias=True,
         hidden_size=128, num_attention_heads=8), shards=(2, 4), oracle=seeds.falcon_rw_oracle),
    Case("falcon-bare-names", seeds.bare(seeds.tiny_falcon, "transformer.")),
    Case("falcon-refined-web", seeds.tiny_refined_web, oracle=seeds.oracle_beside),
    Case("mpt", seeds.tiny_mpt),
    Case("mpt-clipped", seeds.tiny_mpt, dict(attn_config=dict(clip_qkv=1.5, softmax_scale=0.3))),
    Case("mpt-norms-on-heads", tiny_mpt_with, dict(attention=dict(qk_ln=True, alibi_bias_max=6)), oracle=mpt_logits),
    Case("mpt-learned-positions", tiny_mpt_with, dict(attention=dict(alibi=False, qk_ln=True), no_bias=False,
         logit_scale="inv_sqrt_d_model"), oracle=mpt_logits),
    Case("mpt-multi-query", tiny_mpt_with, dict(attention=dict(attn_type="multiquery_attention", qk_ln=True),
         expansion_ratio=2, logit_scale=0.5), oracle=mpt_logits),
    Case("mpt-grouped-query", tiny_mpt_with, dict(attention=dict(attn_type="grouped_query_attention", kv_n_heads=2,
         qk_ln=True)), shards=(2, 3, 4), oracle=mpt_logits),
    Case("gpt2", seeds.tiny_gpt2),
    Case("gpt2-scaled-by-layer", seeds.tiny_gpt2, dict(scale_attn_by_inverse_layer_idx=True, n_inner=136,
         tie_word_embeddings=False)),
    Case("gpt2-unscaled", seeds.tiny_gpt2, dict(scale_attn_weights=False, spread=0.25)),
    Case("gpt2-bare-names", seeds.bare(seeds.tiny_gpt2, "transformer.", ("h.0.attn.bias", "h.0.attn.masked_bias"))),
    Case("gptj", seeds.tiny_gptj),
    Case("gptj-all-dimensions", seeds.tiny_gptj, dict(rotary_dim=24)),
    Case("starcoder2", seeds.tiny_starcoder2),
    Case("starcoder2-no-window", seeds.tiny_starcoder2, dict(sliding_window=None, use_bias=False)),
    Case("mistral", today.tiny_mistral, shards=(2, 4)),
    Case("mistral-nemo", today.tiny_mistral, dict(sliding_window=None, head_dim=32)),
    Case("qwen2", today.tiny_qwen2, dict(tie_word_embeddings=True)),
    Case("qwen2-window-in-upper-layers", today.tiny_qwen2, dict(use_sliding_window=True, sliding_window=20,
         max_window_layers=1)),
    Case("qwen3", today.tiny_qwen3, shards=(2, 4)),
    Case("qwen3-odd-sizes", today.tiny_qwen3, dict(vocab_size=317, hidden_size=106, intermediate_size=131,
         num_attention_heads=9, num_key_value_heads=3, attention_bias=True, use_sliding_window=True, sliding_window=7,
         layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    Case("gemma", today.tiny_gemma),
    Case("gemma-one-key-head", today.tiny_gemma, dict(num_key_value_heads=1, hidden_act="gelu")),
    Case("gemma2", today.tiny_gemma2),
    Case("gemma2-no-caps", today.tiny_gemma2, dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    Case("gemma3", today.tiny_gemma3),
    Case("gemma3-of-its-day", today.tiny_gemma3_of_its_day, dict(num_key_value_heads=1)),
    Case("gemma3-of-a-vision-model", today.tiny_gemma3_of_a_vision_model),
    Case("phi3", today.tiny_phi3, dict(sliding_window=20, num_key_value_heads=6)),
    Case("phi3-longrope", today.tiny_phi3, dict(original_max_position_embeddings=256,
         rope_parameters=today.long_rope(8))),
    Case("phi4-mini", today.tiny_phi3, dict(original_max_position_embeddings=256, tie_word_embeddings=True,
         rope_parameters=today.long_rope(6, partial_rotary_factor=0.75))),
    Case("olmo2", today.tiny_olmo2, shards=(2, 4)),
    Case("olmo2-odd-sizes", today.tiny_olmo2, dict(hidden_size=108, num_attention_heads=9, num_key_value_heads=3,
         attention_bias=True)),
    Case("granite", today.tiny_granite),
    Case("granite-biases-tied", today.tiny_granite, dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    Case("mamba", mamba.tiny_mamba, shards=(2, 3)),
    Case("mamba-biases", mamba.tiny_mamba, dict(use_bias=True, use_conv_bias=False, conv_kernel=3,
         intermediate_size=131, time_step_rank="auto", tie_word_embeddings=False)),
    Case("qwen3-next", hybrid.tiny_qwen3_next, shards=(2, 3)),
    Case("qwen3-next-state-last", hybrid.tiny_qwen3_next, dict(num_hidden_layers=3, linear_value_head_dim=20,
         layer_types=["linear_attention", "full_attention", "linear_attention"], mlp_only_layers=[1],
         attention_bias=True, norm_topk_prob=False, linear_conv_kernel_dim=3)),
    Case("qwen3-5", hybrid.tiny_qwen3_5, dict(tie_word_embeddings=True)),
    Case("qwen3-5-beside-vision", hybrid.beside_vision(hybrid.tiny_qwen3_5), oracle=seeds.oracle_beside,
         is_variant=True),
    Case("qwen3-5-moe", hybrid.tiny_qwen3_5_moe),
    Case("qwen3-5-moe-beside-vision", hybrid.beside_vision(hybrid.tiny_qwen3_5_moe), oracle=seeds.oracle_beside,
         is_variant=True),
    Case("mixtral", experts.tiny_mixtral, shards=(2, 4)),
    Case("mixtral-window", experts.tiny_mixtral, dict(sliding_window=20)),
    Case("mixtral-fused", experts.fused(experts.tiny_mixtral, "w1", "w3", "w2", "block_sparse_moe")),
    Case("qwen2-moe", experts.tiny_qwen2_moe),
    Case("qwen2-moe-some-dense", experts.tiny_qwen2_moe, dict(num_hidden_layers=4, decoder_sparse_step=2,
         mlp_only_layers=[3], norm_topk_prob=True, qkv_bias=False)),
    Case("qwen2-moe-windows", experts.tiny_qwen2_moe, dict(use_sliding_window=True, sliding_window=20,
         max_window_layers=2)),
    Case("qwen3-moe", experts.tiny_qwen3_moe, dict(norm_topk_prob=True, mlp_only_layers=[0])),
    Case("qwen3-moe-fused", experts.fused(experts.tiny_qwen3_moe, "gate_proj", "up_proj", "down_proj"),
         dict(use_sliding_window=True, sliding_window=20, attention_bias=True), shards=(2, 3)),
    Case("deepseek-v2-lite", experts.tiny_deepseek),
    Case("deepseek-v2", experts.tiny_deepseek, dict(q_lora_rank=24, topk_method="group_limited_greedy", n_group=3,
         topk_group=2, n_shared_experts=1, attention_bias=True,
         rope_parameters={**experts.STRETCH, "mscale": 1.0, "mscale_all_dim": 0.4})),
    Case("deepseek-v2-plain-rope", experts.tiny_deepseek, dict(rope_parameters=dict(rope_type="default",
         rope_theta=10_000.0), first_k_dense_replace=0)),
    Case("llama4-text", llama4.tiny_llama4_text, is_variant=True),
    Case("cohere", more.tiny_cohere),
    Case("cohere-plus", more.tiny_cohere, dict(use_qk_norm=True, attention_bias=True), is_variant=True),
    Case("cohere2", more.tiny_cohere2, is_variant=True),
    Case("phi", more.tiny_phi),
    Case("phi-head-norms", more.tiny_phi, dict(qk_layernorm=True, num_key_value_heads=2,
         rope_parameters=dict(rope_type="default", rope_theta=1000.0, partial_rotary_factor=0.25)), is_variant=True),
    Case("phimoe", more.tiny_phimoe),
    Case("phimoe-long-rope", more.tiny_phimoe, dict(rope_parameters=today.long_rope(8, short_mscale=1.2,
         long_mscale=1.3, original_max_position_embeddings=200)), is_variant=True),
    Case("olmo", more.tiny_olmo),
    Case("olmo3", more.tiny_olmo3, is_variant=True),
    Case("dbrx", more.tiny_dbrx),
    Case("deepseek-v3", more.tiny_deepseek_v3),
    Case("deepseek-v3-straight", more.tiny_deepseek_v3, dict(q_lora_rank=None, norm_topk_prob=False, n_group=2,
         topk_group=2), is_variant=True),
    Case("gpt-neo", more.tiny_gpt_neo),
    Case("xglm", more.tiny_xglm),
    Case("xglm-unscaled", more.tiny_xglm, dict(scale_embedding=False, tie_word_embeddings=False, pad_token_id=9),
         is_variant=True),
    Case("gpt-oss", more.tiny_gpt_oss),
    Case("gpt-oss-mxfp4", more.tiny_gpt_oss_mxfp4, oracle=seeds.oracle_beside, is_variant=True),
    Case("codegen", more.tiny_codegen),
    Case("baichuan-13b", more.tiny_baichuan_13b, oracle=more.alibi_oracle, is_variant=True),
    Case("baichuan", more.tiny_baichuan, oracle=seeds.oracle_beside),
    t5_case("bart", more.tiny_bart),
    t5_case("pegasus", more.tiny_pegasus, changes=dict(activation_function="relu")),
    t5_case("t5", t5.tiny_t5, shards=(2, 4)),
    t5_case("flan-t5", t5.tiny_flan_t5, shards=(2, 4)),
    t5_case("mt5", t5.tiny_mt5),
    t5_case("t5-of-its-day", t5.tiny_t5_of_its_day, changes=dict(feed_forward_proj="gated-silu")),
    t5_case("t5-uneven-heads", t5.tiny_t5, changes=dict(num_heads=5, d_kv=24, num_decoder_layers=None), shards=(2, 3)),
]  # fmt: skip


def marks(case: Case, world_size: int) -> list[pytest.MarkDecorator]:
    """Variants are cut like the model that they are variants of: two shards of every one are for `make test-shards`,
    and so are variants by name.

    So are four shards, but for one architecture.
    """
    is_variant = case.is_variant or (world_size == 2 and case.shards == (2,))
    return [pytest.mark.shards] if is_variant or (world_size == 4 and case.name != "llama") else []


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        pytest.param(case, size, id=f"{case.name}-{size}", marks=marks(case, size))
        for case in CASES
        for size in (1, *case.shards)
    ],
)
def test_tokens_and_logits_equal_transformers(
    case: Case, world_size: int, tmp_path: Path, shards: ShardProcesses
) -> None:
    folder = case.make(tmp_path, **case.changes)
    asked = prompts(case.changes.get("vocab_size", 320))
    if world_size == 1:
        answers = answer(folder, asked)
    else:
        answers, *others = shards.answer(folder, asked, world_size)
        assert all(other.tokens == answers.tokens for other in others), "the shards disagree"
    asked = [[*prompt, *case.start] for prompt in asked]
    whole = [prompt + tokens for prompt, tokens in zip(asked, answers.tokens, strict=True)]
    check(asked, answers, case.oracle(folder, whole))


def check(asked: list[list[int]], answers: Answers, expected: list[torch.Tensor]) -> None:
    """Every token we chose is the one transformers chooses after the same text: so the whole answers are equal."""
    for prompt, tokens, logprobs, ours, theirs in zip(
        asked, answers.tokens, answers.logprobs, answers.logits, expected, strict=True
    ):
        behind = theirs[len(prompt) - 1 : -1]
        assert tokens == behind.argmax(-1).tolist()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
        chosen = behind.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), chosen, rtol=0, atol=TOLERANCE)
