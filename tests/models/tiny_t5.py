"""Tiny random T5s, as transformers writes them and as their publishers did, and what transformers makes of them.

A sequence is the encoder's tokens, then the decoder's, of which the first is START. The oracle gives the encoder's
places the logits of a hidden state of zeros: nothing is predicted there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import write_tokenizer

# Not in any prompt of the tests.
START = 1
# d_kv * heads is not d_model; more positions than distances, so that the last buckets are full.
SIZES: dict[str, Any] = dict(
    vocab_size=320,
    d_model=72,
    d_kv=16,
    d_ff=130,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=6,
    relative_attention_num_buckets=12,
    relative_attention_max_distance=40,
    decoder_start_token_id=START,
    pad_token_id=0,
    eos_token_id=2,
)
# Deviation from the mean, by the end of a parameter's name: scores have no scale, so what makes them is small.
SPREADS = {"q.weight": 0.12, "k.weight": 0.12, "relative_attention_bias.weight": 1.0, "wo.weight": 0.1}


def tiny_t5(folder: Path, **changes: Any) -> Path:
    return _write("T5", folder, changes)


def tiny_flan_t5(folder: Path, **changes: Any) -> Path:
    """T5 1.1: gated, with a head of its own, nothing scaled; config.json as its publishers wrote it."""
    _write("T5", folder, {**changes, "feed_forward_proj": "gated-gelu"})
    _give_a_head(folder)
    _rewrite_config(folder, {"tie_word_embeddings": False})
    return folder


def tiny_mt5(folder: Path, **changes: Any) -> Path:
    _write("MT5", folder, {"feed_forward_proj": "gated-gelu", **changes})
    _give_a_head(folder)
    return folder


def tiny_t5_of_its_day(folder: Path, **changes: Any) -> Path:
    """As T5 was first published: the embedding under all its names and as the head, a bias that nobody uses."""
    tiny_t5(folder, **changes)
    tensors = load_file(folder / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    unused = tensors["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = unused
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _rewrite_config(folder, {})
    return folder


def encoder_decoder_logits(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits [length, vocab] of each sequence alone, in float32 and with transformers' plainest attention."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [_logits(model, sequence) for sequence in sequences]


def generated(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers itself generates, greedily."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    length = dict(
        min_new_tokens=num_tokens, max_new_tokens=num_tokens, eos_token_id=None, do_sample=False, use_cache=False
    )
    with torch.inference_mode():
        return [model.generate(torch.tensor([prompt]), **length)[0, 1:].tolist() for prompt in prompts]


def _logits(model: Any, sequence: list[int]) -> torch.Tensor:
    first = sequence.index(START)
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([sequence[:first]]),
            decoder_input_ids=torch.tensor([sequence[first:]]),
            use_cache=False,
        ).logits[0]
        nothing = model.lm_head(_final_norm(model)(torch.zeros(first, model.config.d_model)))
    return torch.cat((nothing + getattr(model, "final_logits_bias", 0.0), out))


def _final_norm(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Behind the decoder. BART has none, and T5's makes nothing of nothing."""
    return getattr(model.get_decoder(), "layer_norm", None) or (lambda x: x)


def _write(family: str, folder: Path, changes: dict[str, Any]) -> Path:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = next((spread for end, spread in SPREADS.items() if name.endswith(end)), 0.3)
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, spread, generator=generator)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _give_a_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors["lm_head.weight"] = torch.randn(tensors["shared.weight"].shape, generator=generator) * 0.3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _rewrite_config(folder: Path, changes: dict[str, Any]) -> None:
    """Without what only transformers 5 writes."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name in ("scale_decoder_outputs", "tie_word_embeddings"):
        config.pop(name, None)
    file.write_text(json.dumps(config | changes))
