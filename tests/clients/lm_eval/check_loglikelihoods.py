"""lm-eval over HTTP and lm-eval on transformers: the same file of weights, the same numbers.

The harness asks `/v1/completions` for prompts, echoed and with logprobs. The judge is its own `hf` model, which reads
and dequantises the file with the code of transformers. Both have the tokenizer that the server has: transformers would
read another one out of this file, which keeps the digits of a number together.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from tests.clients.served import MODEL, URL

FILE = Path(os.environ["LEGATO_MODEL_FILE"])
TOKENIZER = os.environ["LEGATO_TOKENIZER"]
FACTS = Path(__file__).parent / "facts.jsonl"
SHARED: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(FACTS)}},
    "test_split": "test",
    "doc_to_text": "question",
    "num_fewshot": 0,
}
CHOICES = SHARED | {
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
}
TEXTS = SHARED | {
    "task": "texts",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@cache
def judged() -> dict[str, list[Any]]:
    arguments = {"pretrained": str(FILE.parent), "gguf_file": FILE.name, "dtype": "float32", "device": "cpu"}
    return responses("hf", {**arguments, "tokenizer": TOKENIZER}, [CHOICES, TEXTS])


def served(task: dict[str, Any], **arguments: Any) -> list[Any]:
    arguments |= {"model": MODEL, "base_url": f"{URL}/v1/completions", "tokenizer": TOKENIZER, "max_retries": 1}
    arguments["tokenizer_backend"] = "huggingface"
    return responses("local-completions", arguments, [task])[task["task"]]


def responses(model: str, arguments: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What the model said to each question of each task, in the order of the file."""
    found = lm_eval.simple_evaluate(model, arguments, tasks=tasks, log_samples=True, bootstrap_iters=0)
    return {
        name: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for name, samples in found["samples"].items()
    }


@pytest.mark.parametrize(
    "way",
    [{}, {"num_concurrent": 4, "batch_size": 4}, {"tokenized_requests": False}],
    ids=["ids", "batches", "texts"],
)
def test_loglikelihoods_are_those_of_transformers(way: dict[str, Any]) -> None:
    answers = [choice for question in served(CHOICES, **way) for choice in question]
    expected = [choice for question in judged()["choices"] for choice in question]
    assert len(answers) == len(expected) == 80
    assert [logprob for logprob, _ in answers] == pytest.approx([logprob for logprob, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]


def test_greedy_texts_are_those_of_transformers() -> None:
    answers = served(TEXTS)
    assert len(answers) == 20
    assert answers == judged()["texts"]
