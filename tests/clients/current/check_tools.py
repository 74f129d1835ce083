"""Tools of strangers under `required`: whatever a small model thinks of them, its arguments fit their schemas."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from tests.clients.current.tool_schemas import Question, questions
from tests.clients.served import MODEL, URL

QUESTIONS = questions()
NAMED = QUESTIONS[::10]
AT_ONCE = 16
# Often too few for what this model would like to write into a string. The server ends such calls in time.
MAX_TOKENS = 400


def asked(questions: list[Question], choose: Any) -> dict[str, Any]:
    """The one choice of every answer, by the question's id."""

    async def main() -> dict[str, Any]:
        free = asyncio.Semaphore(AT_ONCE)
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-", timeout=600, max_retries=0) as client:

            async def ask(question: Question) -> Any:
                async with free:
                    answer = await client.chat.completions.create(
                        model=MODEL, messages=question.messages, tools=question.tools, tool_choice=choose(question),
                        temperature=0, max_tokens=MAX_TOKENS,
                    )  # fmt: skip
                return answer.choices[0]

            choices = await asyncio.gather(*map(ask, questions))
        return {question.id: choice for question, choice in zip(questions, choices, strict=True)}

    return asyncio.run(main())


def last_tool(question: Question) -> dict[str, Any]:
    return {"type": "function", "function": {"name": question.tools[-1]["function"]["name"]}}


@pytest.fixture(scope="module")
def required() -> dict[str, Any]:
    return asked(QUESTIONS, lambda question: "required")


@pytest.fixture(scope="module")
def named() -> dict[str, Any]:
    return asked(NAMED, last_tool)


def check(question: Question, choice: Any) -> str:
    """The name of the tool that was called."""
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert choice.message.content is None
    Draft202012Validator(question.schemas[call.function.name]).validate(json.loads(call.function.arguments))
    return str(call.function.name)


def test_there_are_two_hundred() -> None:
    assert len(QUESTIONS) == 200


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
def test_the_arguments_of_a_required_call_are_valid(question: Question, required: dict[str, Any]) -> None:
    check(question, required[question.id])


@pytest.mark.parametrize("question", NAMED, ids=lambda question: question.id)
def test_a_named_tool_is_called_with_valid_arguments(question: Question, named: dict[str, Any]) -> None:
    assert check(question, named[question.id]) == question.tools[-1]["function"]["name"]
