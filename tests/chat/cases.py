"""Conversations that bring out what chat templates differ in, and transformers' own answer to them."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from legato.chat.sources import ChatTemplates
from legato.chat.template import ChatTemplate, MissingTemplateVariable, TemplateError

Message = dict[str, Any]

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a place, «now» & <soon>.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City and country"},
                "days": {"type": "integer", "enum": [1, 3, 7]},
                "where": {"type": "array", "items": {"type": "object", "properties": {"lat": {"type": "number"}}}},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def system(text: str = "You are terse.") -> Message:
    return {"role": "system", "content": text}


def user(content: Any = "What is 2 + 2?") -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any = "4", **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def call(arguments: Any, name: str = "get_weather", call_id: str = "call00001") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any = '{"sky": "clear"}', call_id: str = "call00001") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": "get_weather", "content": content}


CITY = {"city": "Paris", "days": 3}
NOT_PROMPTED = {"add_generation_prompt": False}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
TOOLS = {"tools": [WEATHER, CLOCK]}

# name -> messages and the arguments of `render`
CONVERSATIONS: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "question": ([user()], {}),
    "system prompt": ([system(), user()], {}),
    "turns": ([system(), user(), assistant(), user("And 3 + 3?")], {}),
    "turns without a prompt for more": ([user(), assistant(), user("And 3 + 3?"), assistant("6")], NOT_PROMPTED),
    "awkward text": (
        [
            system("  \n indented {{ 7 * 7 }}\n\n"),
            user(" <|im_end|> [INST] é 😀 \\n \"quoted\" 'x' \t"),
            assistant(" a </think> b "),
            user(""),
        ],
        {},
    ),
    "two questions in a row": ([user("One."), user("Two.")], {}),
    "answer first": ([assistant("Hello!"), user()], {}),
    "system prompt late": ([user(), assistant(), system("Now be verbose."), user("Why?")], {}),
    "unknown role": ([user(), {"role": "critic", "content": "Weak."}], {}),
    "no content": ([user(), {"role": "assistant"}, user("Well?")], {}),
    "null content": ([user(), assistant(None), user("Well?")], {}),
    "names": ([{**user(), "name": "ann"}, {**assistant(), "name": "bob"}, user("Who?")], {}),
    "answer continued": ([user(), assistant("The answer")], CONTINUED),
    "answer with a space continued": ([system(), user(), assistant("The answer is ")], CONTINUED),
    "empty answer continued": ([user(), assistant("")], CONTINUED),
    "question continued": ([user("What is")], CONTINUED),
    "answer with thoughts continued": ([user(), assistant("So 4", reasoning_content="2 and 2")], CONTINUED),
    "tools": ([system(), user("Weather in Paris?")], TOOLS),
    "no tools at all": ([user("Weather in Paris?")], {"tools": []}),
    "call with an object": (
        [user("Paris?"), assistant("", tool_calls=[call(CITY)]), result(), assistant("Clear."), user("Sure?")],
        TOOLS,
    ),
    "call with a string": (
        [user("Paris?"), assistant(None, tool_calls=[call('{"city": "Paris"}')]), result()],
        TOOLS,
    ),
    "two calls": (
        [
            user("Paris? The time?"),
            assistant("Let me see.", tool_calls=[call(CITY), call({}, "clock", "call00002")]),
            result(),
            result("12:30", "call00002"),
        ],
        TOOLS,
    ),
    "call without tools": ([user("Paris?"), assistant("", tool_calls=[call(CITY)]), result(), user("So?")], {}),
    "thoughts": (
        [user(), assistant("4", reasoning_content="2 and 2"), user("3 + 3?"), assistant("6", reasoning="3 and 3")],
        NOT_PROMPTED,
    ),
    "thoughts in the text": ([user(), assistant("<think>\n2 and 2\n</think>\n\n4"), user("Sure?")], {}),
    "no thinking": ([system(), user()], {"kwargs": {"enable_thinking": False, "thinking": False}}),
    "date given": ([user("Today?")], {"kwargs": {"date_string": "26 Jul 2024", "bos_token": "<BOS>"}}),
    "documents": (
        [user("Who?")],
        {"documents": [{"title": "A", "text": "Ann did it."}, {"title": "B", "text": "No."}]},
    ),
}

PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": " 2 + 2?"}]


def make(templates: str | dict[str, str], tokens: dict[str, str] = TOKENS) -> ChatTemplate:
    named = {"default": templates} if isinstance(templates, str) else templates
    return ChatTemplate(ChatTemplates("test", named, tokens))


def ours(template: ChatTemplate, messages: list[Message], **arguments: Any) -> str | type[Exception]:
    """The prompt, or `Exception` where there is none."""
    try:
        return template.render(messages, **arguments)
    except (TemplateError, MissingTemplateVariable):
        return Exception


class Reference:
    """transformers with the same template."""

    def __init__(self, templates: str | dict[str, str], tokens: dict[str, str] = TOKENS) -> None:
        vocabulary = {token: number for number, token in enumerate(tokens.values())}
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token=tokens["unk_token"])), **tokens
        )
        self._tokenizer.chat_template = templates

    def render(self, messages: list[Message], **arguments: Any) -> str | type[Exception]:
        arguments = {"add_generation_prompt": True, **arguments}
        kwargs = arguments.pop("kwargs", {})
        try:
            prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments, **kwargs)
        except Exception:
            return Exception
        assert isinstance(prompt, str)
        return prompt
