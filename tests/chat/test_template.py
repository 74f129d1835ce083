"""Chat templates against transformers, byte for byte, and what is ours alone: content parts, errors, facts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legato.chat.template import ChatTemplate, MissingTemplateVariable, TemplateError
from tests.chat.cases import (
    CONVERSATIONS,
    PARTS,
    TOKENS,
    WEATHER,
    Message,
    Reference,
    assistant,
    make,
    ours,
    result,
    system,
    user,
)

FOLDER = Path(__file__).parent / "templates"
FAMILIES = sorted({file.stem.partition(".")[0] for file in FOLDER.glob("*.jinja")})
# Templates that print nothing for a string. transformers leaves it to the caller to know; we make parts of it.
PARTS_ONLY = {"smolvlm"}
BOTH = {"gemma3", "llama32_vision"}

# For each family; together they are hundreds.
FEW = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def source(family: str) -> str | dict[str, str]:
    default = (FOLDER / f"{family}.jinja").read_text()
    for_tools = FOLDER / f"{family}.tool_use.jinja"
    return {"default": default, "tool_use": for_tools.read_text()} if for_tools.exists() else default


def in_parts(messages: list[Message]) -> list[Message]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, ChatTemplate, Reference]]:
    template = make(source(request.param))
    yield request.param, template, Reference(source(request.param))
    template.close()


@pytest.fixture
def chatml() -> Iterator[ChatTemplate]:
    template = make(source("chatml"))
    yield template
    template.close()


def render(template: str | dict[str, str], *messages: Message, **arguments: Any) -> str:
    chat = make(template)
    try:
        return chat.render(list(messages), **arguments)
    finally:
        chat.close()


class TestEquality:
    def test_there_are_templates_of_many_families(self) -> None:
        assert len(FAMILIES) >= 40

    def test_every_conversation_renders_as_in_transformers(self, family: tuple[str, ChatTemplate, Reference]) -> None:
        kind, template, reference = family
        num_rendered = 0
        for name, (messages, arguments) in CONVERSATIONS.items():
            expected = reference.render(in_parts(messages) if kind in PARTS_ONLY else messages, **arguments)
            assert ours(template, messages, **arguments) == expected, name
            num_rendered += isinstance(expected, str)
        assert num_rendered >= 12

    def test_content_parts_are_passed_on_or_joined(self, family: tuple[str, ChatTemplate, Reference]) -> None:
        kind, template, reference = family
        joined = "".join(part["text"] for part in PARTS)
        expected = reference.render([user(PARTS if kind in PARTS_ONLY | BOTH else joined)])
        assert isinstance(expected, str)
        assert ours(template, [user(PARTS)]) == expected

    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
    data = st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    )
    roles = st.sampled_from(["system", "user", "assistant", "tool"])
    messages = st.lists(
        st.fixed_dictionaries(
            {"role": roles, "content": st.text(max_size=30)},
            optional={"name": st.text(max_size=5), "reasoning_content": st.text(max_size=10), "tool_calls": data},
        ),
        min_size=1,
        max_size=5,
    )

    @FEW
    @given(messages=messages, tools=st.none() | st.just([WEATHER]), last=st.booleans())
    def test_random_conversations_render_as_in_transformers(
        self,
        family: tuple[str, ChatTemplate, Reference],
        messages: list[Message],
        tools: list[Message] | None,
        last: bool,
    ) -> None:
        kind, template, reference = family
        arguments = {"tools": tools, "add_generation_prompt": not last, "continue_final_message": last}
        expected = reference.render(in_parts(messages) if kind in PARTS_ONLY else messages, **arguments)
        assert ours(template, messages, **arguments) == expected

    @FEW
    @given(messages=st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), data)), kwargs=data)
    def test_any_json_is_rendered_or_refused(
        self, family: tuple[str, ChatTemplate, Reference], messages: list[Message], kwargs: Any
    ) -> None:
        _, template, _ = family
        answer = ours(template, messages, kwargs=kwargs if isinstance(kwargs, dict) else {})
        assert answer is Exception or isinstance(answer, str)


class TestLanguage:
    """What templates may use, as far as the families above do not."""

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages | tojson(indent=2) }}{{ {'é': [1.5, none, true]} | tojson(ensure_ascii=true) }}",
            "{{ {'b': 1, 'a': '<&>'} | tojson(sort_keys=true, separators=(',', ':')) }}",
            "{% for x in 'abc' %}{% if x == 'a' %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}",
            "{% generation %}{% set inside = 1 %}{{ messages[0].content }}{% endgeneration %}{{ inside is defined }}",
            "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
            "  {% if true %}\n    a\n  {% endif %}\n\n  {{- 'b' }}\n",
            "{{ namespace(self=1).self }}{% set ns = namespace({'a': 1}, b=2) %}{% set ns.c = ns.a + ns.b %}{{ ns.c }}",
            "{% set ns = namespace() %}{% set ns._secret = 1 %}",
            "{{ namespace(__class__=1) }}",
            "{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}{{ dict is callable }}",
            "{{ dict.__subclasses__() }}",
            "{{ lipsum(n=1) | length > 0 }}{{ 'a b c d' | wordwrap(3) }}{{ messages | pprint }}",
            "{{ '<b>x</b>' | striptags }}{{ 'é'.encode('utf-16') }}{{ '%05.1f' | format(3) }}{{ [3, 1] | sort }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({}) }}",
            "{{ '{0.role}'.format(messages[0]) }}{{ '{0.__class__}'.format(1) }}",
            "{{ ('%s' | format) }}",
            "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token }}{{ missing }}",
            "{{ missing.attribute }}",
            "{{ bos_token + missing }}",
            "{{ messages[0]['content'][::-1] }}{{ messages[0].content.split('2') }}",
            "{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}{{ enable_thinking is defined }}",
            "{% include 'other' %}",
            "{% if %}",
            "{{ unclosed",
            "{% for x in messages %}",
            "{% unknown %}",
            "{{ messages | nosuchfilter }}",
            "",
        ],
    )
    def test_it_means_what_it_means_in_transformers(self, template: str) -> None:
        chat = make(template)
        assert ours(chat, [user()]) == Reference(template).render([user()])
        chat.close()

    def test_the_time_is_the_local_time(self) -> None:
        assert render("{{ strftime_now('%Y %B') }}", user()) == time.strftime("%Y %B")

    def test_messages_stay_as_they_were(self, chatml: ChatTemplate) -> None:
        message = assistant("Well")
        messages = [user(), message, user(), message]
        text = chatml.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert text.count("Well") == 2 and text.count("Well<|im_end|>") == 1
        assert message == assistant("Well")


class TestContent:
    def test_each_role_has_its_own_form(self) -> None:
        template = (
            "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}({{ p.text }}){% endfor %}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        )
        assert render(template, system(), user("a"), user(PARTS)) == "You are terse.(a)(What is )( 2 + 2?)"
        parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
        assert render(template, {"role": "system", "content": parts}, user("a")) == "Be brief.(a)"

    def test_a_macro_does_not_hide_what_the_template_takes(self) -> None:
        template = (
            "{% macro say(x) %}{% if x is string %}{{ x }}{% else %}{% for p in x %}[{{ p.text }}]{% endfor %}"
            "{% endif %}{% endmacro %}{% for m in messages %}{{ say(m.content) }}{% endfor %}"
        )
        assert render(template, user("a"), user(PARTS)) == "a[What is ][ 2 + 2?]"

    def test_parts_that_are_no_text_are_refused_by_name(self, chatml: ChatTemplate) -> None:
        image = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
        with pytest.raises(TemplateError, match="'image_url'"):
            chatml.render([user([*PARTS, image])])

    @pytest.mark.parametrize("parts", [[1], ["text"], [{"type": "text"}], [{"type": "text", "text": 1}], [None]])
    def test_parts_without_text_are_refused(self, chatml: ChatTemplate, parts: list[Any]) -> None:
        with pytest.raises(TemplateError, match="takes text only"):
            chatml.render([user(parts)])

    def test_no_parts_are_no_text(self, chatml: ChatTemplate) -> None:
        assert chatml.render([user([])]) == chatml.render([user("")])

    def test_tool_results_in_parts_are_joined_where_the_template_would_print_the_list(self) -> None:
        template = make(source("llama31"))
        calls = [{"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {}}}]
        conversation = [user(), assistant("", tool_calls=calls)]
        texts = [template.render([*conversation, result(content)]) for content in (PARTS, "What is  2 + 2?")]
        template.close()
        assert texts[0] == texts[1]


class TestTools:
    @pytest.mark.parametrize(
        ("kind", "mentioned"), [("llama31", True), ("qwen25", True), ("hermes", True), ("chatml", False)]
    )
    def test_whether_the_template_speaks_of_tools_is_known(self, kind: str, mentioned: bool) -> None:
        template = make(source(kind))
        assert template.mentions_tools is mentioned
        template.close()

    @pytest.mark.parametrize(("kind", "form"), [("qwen25", "object"), ("deepseek_r1", "string"), ("chatml", "object")])
    def test_how_arguments_are_wanted_is_known(self, kind: str, form: str) -> None:
        template = make(source(kind))
        assert template.tool_arguments == form
        template.close()

    def test_a_template_for_tools_alone_is_tried_out_with_tools(self) -> None:
        prints_strings = "{% for t in tools %}{% endfor %}{{ messages[1].tool_calls[0].function.arguments + '' }}"
        template = make({"default": "plain", "tool_use": prints_strings})
        assert template.tool_arguments == "string"
        template.close()

    def test_a_template_for_tools_is_used_with_tools_only(self) -> None:
        templates = {"default": "plain", "tool_use": "tools", "rag": "rag"}
        assert render(templates, user()) == "plain"
        assert render(templates, user(), tools=[WEATHER]) == "tools"
        assert render({"default": "plain"}, user(), tools=[WEATHER]) == "plain"

    def test_without_a_default_the_names_are_told(self) -> None:
        with pytest.raises(TemplateError, match="only rag, tool_use"):
            render({"tool_use": "tools", "rag": "rag"}, user())
        assert render({"tool_use": "tools"}, user(), tools=[WEATHER]) == "tools"


class TestErrors:
    @pytest.mark.parametrize(
        ("template", "error", "message"),
        [
            ("{{ raise_exception('Roles must alternate') }}", TemplateError, "Template error: Roles must alternate"),
            (
                "a\n{% if %}",
                TemplateError,
                "Template error: Expected an expression, got 'end of statement",
            ),
            ("{{ 1 + 'a' }}", TemplateError, "Template error: TypeError: unsupported operand"),
            ("{{ missing.x }}", MissingTemplateVariable, "Missing template variable: 'missing' is undefined"),
            ("{{ messages[0].x.y }}", MissingTemplateVariable, "Missing template variable: 'dict object' has no"),
        ],
    )
    def test_an_error_says_what_is_wrong(self, template: str, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as raised:
            render(template, user())
        assert str(raised.value).startswith(message)

    def test_errors_are_422_with_the_types_of_tgi(self) -> None:
        assert (TemplateError.status, TemplateError.error_type) == (422, "template_error")
        assert (MissingTemplateVariable.status, MissingTemplateVariable.error_type) == (
            422,
            "missing_template_variable",
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"messages": []}, "there are no messages"),
            ({"messages": ["hello"]}, "`messages` must be a list of objects"),
            ({"messages": [user()], "tools": ["f"]}, "`tools` must be a list of objects"),
            ({"messages": [user()], "documents": [1]}, "`documents` must be a list of objects"),
            ({"messages": [user()], "continue_final_message": True}, "are mutually exclusive"),
        ],
    )
    def test_a_request_that_makes_no_sense_is_refused(
        self, chatml: ChatTemplate, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(TemplateError, match=message):
            chatml.render(**arguments)

    @pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "raise_exception"])
    def test_variables_of_a_request_replace_nothing(self, chatml: ChatTemplate, name: str) -> None:
        with pytest.raises(TemplateError, match=f"`chat_template_kwargs` cannot set `{name}`"):
            chatml.render([user()], kwargs={name: "x"})

    def test_a_template_in_a_message_is_just_text(self, chatml: ChatTemplate) -> None:
        assert "{{ 7 * 7 }}{% raw %}" in chatml.render([user("{{ 7 * 7 }}{% raw %}")])

    @pytest.mark.parametrize("last", [assistant(None), {"role": "assistant"}, assistant({"text": "a"})])
    def test_nothing_to_continue_is_an_error(self, chatml: ChatTemplate, last: Message) -> None:
        with pytest.raises(TemplateError, match="needs a last message with text"):
            chatml.render([user(), last], add_generation_prompt=False, continue_final_message=True)

    @pytest.mark.parametrize("template", ["{{ messages[0].content }}", "fixed", "{{ messages[-1].content | upper }}"])
    def test_a_last_message_that_is_not_printed_cannot_be_continued(self, template: str) -> None:
        with pytest.raises(TemplateError, match=r"cannot be continued|does not work with this chat template"):
            render(template, user(), assistant("yes"), add_generation_prompt=False, continue_final_message=True)


def test_threads_render_at_once(chatml: ChatTemplate) -> None:
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda number: chatml.render([user(f"number {number}")]), range(100)))
    assert [f"number {number}<" in text for number, text in enumerate(texts)] == [True] * 100


def test_special_tokens_are_variables() -> None:
    assert render("".join(f"{{{{ {name} }}}}" for name in TOKENS), user()) == "".join(TOKENS.values())
