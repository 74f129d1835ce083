"""Tiny random checkpoints, written by transformers, which is also the oracle for what they should answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def tiny_llama(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A Llama of a few thousand parameters with the features that matter: grouped heads, several layers, a BPE."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).to(dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges: 256 bytes and a few specials, so any text and any id below 320 works."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<unk>", "<s>", "</s>", *(f"<extra_{i}>" for i in range(61))]
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials[:3])
    tokenizer.save(str(folder / "tokenizer.json"))


def greedy_oracle(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers generates greedily, one prompt at a time, end-of-sequence ignored."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = list(prompt)
            cache = None
            inputs = torch.tensor([tokens])
            for _ in range(num_tokens):
                out = model(inputs, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                tokens.append(int(out.logits[0, -1].argmax()))
                inputs = torch.tensor([[tokens[-1]]])
            answers.append(tokens[len(prompt) :])
    return answers
