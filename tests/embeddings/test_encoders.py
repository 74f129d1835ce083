"""Vectors of ragged batches are those that transformers computes for each text alone, to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from legato.modelfiles.files import ModelFiles
from legato.models.encoders.batch import EncodedText, TextBatch, attend
from legato.models.encoders.registry import EmbeddingModel, load_encoder
from tests.embeddings.tiny_encoders import logits, tiny_encoder, token_vectors, write_modules

CPU = torch.device("cpu")
# Single tokens, equal lengths, and some that are longer than the windows of ModernBERT.
LENGTHS = [7, 1, 40, 7, 23, 90, 7, 24]


def texts(seed: int = 0) -> list[EncodedText]:
    generator = torch.Generator().manual_seed(seed)
    return [EncodedText(torch.randint(4, 320, (length,), generator=generator).tolist()) for length in LENGTHS]


def loaded(folder: Path, **options: Any) -> EmbeddingModel:
    return load_encoder(ModelFiles.open(folder), torch.float32, CPU, **options)


def pooled(vectors: torch.Tensor, pooling: str) -> torch.Tensor:
    return {"mean": vectors.mean(0), "cls": vectors[0], "last": vectors[-1]}[pooling]


@pytest.mark.parametrize(
    ("family", "head", "pooling"),
    [
        ("Bert", "Model", "mean"),
        ("Bert", "ForMaskedLM", "cls"),
        ("Roberta", "Model", "mean"),
        ("XLMRoberta", "Model", "cls"),
        ("ModernBert", "Model", "mean"),
        ("ModernBert", "ForMaskedLM", "cls"),
        ("Qwen3", "Model", "last"),
        ("Qwen3", "ForCausalLM", "last"),
    ],
)
def test_embeddings_are_those_of_transformers(tmp_path: Path, family: str, head: str, pooling: str) -> None:
    folder = tiny_encoder(tmp_path, family, head)
    write_modules(folder, pooling)
    found = loaded(folder).vectors(texts())
    for text, vector in zip(texts(), found, strict=True):
        expected = pooled(token_vectors(folder, list(text.input_ids)), pooling)
        torch.testing.assert_close(F.normalize(vector, dim=0), F.normalize(expected, dim=0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta", "ModernBert"])
def test_classifiers_have_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    folder = tiny_encoder(tmp_path, family, "ForSequenceClassification", num_labels=3)
    pairs = [EncodedText(text.input_ids, len(text) // 2 if family == "Bert" else 0) for text in texts()]
    found = loaded(folder).vectors(pairs)
    for text, vector in zip(pairs, found, strict=True):
        torch.testing.assert_close(
            vector, logits(folder, list(text.input_ids), text.second_start), atol=1e-4, rtol=1e-5
        )


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 9), (True, 9)])
def test_groups_of_similar_texts_are_attended_like_those_of_equal_ones(causal: bool, window: int) -> None:
    """What a GPU does: texts of a group are padded."""
    plain, padded = TextBatch(texts(), CPU), TextBatch(texts(), CPU)
    padded.groups = padded._groups(0.75)
    assert any(group.places is not None for group in padded.groups)
    assert len(padded.groups) < len(plain.groups)
    q = torch.randn(plain.num_tokens, 4, 8)
    k, v = torch.randn(2, plain.num_tokens, 2, 8).unbind(0)
    expected = attend(q, k, v, plain, causal=causal, window=window)
    torch.testing.assert_close(attend(q, k, v, padded, causal=causal, window=window), expected)


def test_a_text_has_the_same_vector_alone_and_among_others(tmp_path: Path) -> None:
    model = loaded(tiny_encoder(tmp_path, "Bert"))
    together = model.vectors(texts())
    for text, vector in zip(texts(), together, strict=True):
        torch.testing.assert_close(model.vectors([text])[0], vector, atol=1e-5, rtol=1e-5)


def test_dummy_weights_have_the_shapes_of_the_configuration(tmp_path: Path) -> None:
    model = loaded(tiny_encoder(tmp_path, "ModernBert"), dummy=True)
    assert model.vectors(texts()).shape == (len(LENGTHS), 64)
