"""Tiny random checkpoints of models that embed or classify, written by transformers, which is also the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    initializer_range=0.2,
)


def write_tokenizer(folder: Path, *, pairs: bool = True) -> None:
    """Bytes between special tokens: `<s> text </s>`, and for pairs `<s> text </s> text </s>` with types 0 and 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<unk>", "<s>", "</s>", *(f"<extra_{i}>" for i in range(60))]
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials[:4])
    second = "$B:1 </s>:1" if pairs else "$B:0 </s>:0"
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair=f"<s> $A </s> {second}", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    # What training left in the file must not cut or pad requests.
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_modules(
    folder: Path, pooling: str = "mean", *, normalize: bool = True, max_tokens: int | None = None
) -> None:
    """The files of sentence-transformers around a checkpoint."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    names = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{name}": key == pooling for key, name in names.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))
    if max_tokens is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))


def tiny_encoder(folder: Path, family: str, head: str = "Model", seed: int = 0, **changes: Any) -> Path:
    """`family` is the prefix of transformers' classes, `head` the rest of the name."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **changes})
    model = getattr(transformers, f"{family}{head}")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # transformers leaves biases at zero and norms at one
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            assert name
    model.save_pretrained(folder)
    write_tokenizer(folder, pairs=family == "Bert")
    return folder


FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": dict(max_position_embeddings=512, type_vocab_size=2, pad_token_id=0),
    "Roberta": dict(max_position_embeddings=514, type_vocab_size=1, pad_token_id=1),
    "XLMRoberta": dict(max_position_embeddings=514, type_vocab_size=1, pad_token_id=1),
    "ModernBert": dict(
        max_position_embeddings=512,
        local_attention=16,
        global_attn_every_n_layers=3,
        pad_token_id=0,
        reference_compile=False,
    ),
    "Qwen3": dict(max_position_embeddings=512, num_key_value_heads=2, head_dim=16, initializer_range=0.1),
}


def token_vectors(folder: Path, ids: list[int], second_start: int = 0) -> torch.Tensor:
    """What transformers computes for one text: [tokens, hidden]."""
    from transformers import AutoModel

    return _run(AutoModel.from_pretrained(folder, dtype=torch.float32), ids, second_start).last_hidden_state[0]


def logits(folder: Path, ids: list[int], second_start: int = 0) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    found: torch.Tensor = _run(model, ids, second_start).logits[0]
    return found


def _run(model: Callable[..., Any], ids: list[int], second_start: int) -> Any:
    model.eval()  # type: ignore[attr-defined]
    inputs: dict[str, torch.Tensor] = {"input_ids": torch.tensor([ids])}
    if second_start:
        inputs["token_type_ids"] = torch.tensor([[0] * second_start + [1] * (len(ids) - second_start)])
    with torch.inference_mode():
        return model(**inputs, attention_mask=torch.ones(1, len(ids), dtype=torch.long))
