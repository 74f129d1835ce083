"""Embeddings through the openai client and huggingface_hub's, from a server of all-MiniLM-L6-v2."""

from __future__ import annotations

import math

import openai
import pytest
from huggingface_hub import InferenceClient

from tests.clients.served import EMBEDDING_URL

TEXTS = ["How do I bake bread?", "Recipe for a loaf of sourdough", "The stock market fell today"]
client = openai.OpenAI(base_url=f"{EMBEDDING_URL}/v1", api_key="none", max_retries=0)


def similarity(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def test_texts_about_the_same_are_near_each_other() -> None:
    answer = client.embeddings.create(model="any", input=TEXTS)
    bread, sourdough, stocks = [item.embedding for item in answer.data]
    assert len(bread) == 384 and similarity(bread, bread) == pytest.approx(1, abs=1e-5)
    assert similarity(bread, sourdough) > 0.5 > similarity(bread, stocks)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_the_clients_formats_and_the_hubs_client_agree() -> None:
    packed = client.embeddings.create(model="any", input=TEXTS[0])  # base64, unless a client asks for floats
    floats = client.embeddings.create(model="any", input=TEXTS[0], encoding_format="float")
    assert packed.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-7)
    (hub,) = InferenceClient(EMBEDDING_URL).feature_extraction(TEXTS[0])
    assert hub.tolist() == pytest.approx(floats.data[0].embedding, abs=1e-6)


def test_dimensions_are_the_first_ones() -> None:
    whole = client.embeddings.create(model="any", input=TEXTS[0]).data[0].embedding
    cut = client.embeddings.create(model="any", input=TEXTS[0], dimensions=8).data[0].embedding
    length = math.hypot(*whole[:8])
    assert cut == pytest.approx([number / length for number in whole[:8]], abs=1e-6)


def test_what_is_wrong_is_a_bad_request_that_names_the_field() -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.embeddings.create(model="any", input=TEXTS, dimensions=4096)
    assert wrong.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.embeddings.create(model="any", input="hello " * 400)
    assert too_long.value.code == "context_length_exceeded"


def test_a_chat_is_refused_with_the_task_that_it_needs() -> None:
    with pytest.raises(openai.NotFoundError, match="--task generate"):
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
