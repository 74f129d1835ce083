"""How templates as they are published mark reasoning, and where an answer to their prompts begins."""

from __future__ import annotations

import zipfile
from codecs import getincrementaldecoder
from itertools import pairwise

import pytest

from legato.chat.answers import ChatFormat
from legato.chat.reasoning.formats import Phase, reasoning_format_of
from legato.chat.tools.parser import ParsedMessage
from tests.chat.cases import make, user
from tests.chat.reasoning.test_transcripts import TRANSCRIPTS
from tests.chat.test_published import FOLDERS, TEMPLATES, wheels
from tests.http.asgi import tokenizer

__all__ = ["wheels"]  # a fixture

pytestmark = pytest.mark.published

BEFORE, INSIDE, AFTER = Phase.BEFORE, Phase.INSIDE, Phase.AFTER
# family -> format, where the answer begins, and where if the template is told that the model should not reason
FAMILIES = {
    "Command A with tools": ("command_a", BEFORE, BEFORE),
    "DeepSeek R1 distilled": ("qwen3", INSIDE, INSIDE),
    "EXAONE 4": ("qwen3", AFTER, AFTER),
    "Gemma 4": ("gemma4", BEFORE, BEFORE),
    "GLM 4.5": ("qwen3", BEFORE, AFTER),
    "gpt-oss": ("gpt_oss", INSIDE, INSIDE),
    "LFM 2.5": ("qwen3", BEFORE, BEFORE),
    "Nemotron 3": ("qwen3", INSIDE, AFTER),
    "Qwen3": ("qwen3", BEFORE, AFTER),
    "Qwen3.5": ("qwen3", INSIDE, AFTER),
}
SILENT = ("ChatML", "Llama 3.1", "Qwen2.5", "Mistral Small", "Gemma 3", "Phi-3")


def source_of(family: str, wheels: dict[str, zipfile.ZipFile]) -> str:
    package, name = TEMPLATES[family]
    return wheels[package].read(f"{FOLDERS[package]}/{name}.jinja").decode()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_is_that_of_the_template(family: str, wheels: dict[str, zipfile.ZipFile]) -> None:
    name, begins, begins_without = FAMILIES[family]
    source = source_of(family, wheels)
    format = reasoning_format_of(source)
    assert format is not None and format.name == name
    template = make(source)
    off = {"enable_thinking": False, "thinking": False}
    assert format.phase_after(template.render([user()])) is begins
    assert format.phase_after(template.render([user()], kwargs=off)) is begins_without
    template.close()


@pytest.mark.parametrize("family", SILENT)
def test_models_that_do_not_reason_have_no_format(family: str, wheels: dict[str, zipfile.ZipFile]) -> None:
    assert reasoning_format_of(source_of(family, wheels)) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_split_of_the_bytes_gives_the_same_parts(family: str, wheels: dict[str, zipfile.ZipFile]) -> None:
    """With everything found out from the template, as a server does it."""
    template = make(source_of(family, wheels))
    chat_format = ChatFormat.of(tokenizer(), template)
    assert chat_format.reasoning is not None
    phase = chat_format.reasoning.phase_after(template.render([user()]))
    template.close()
    transcript = next(each for each in TRANSCRIPTS.values() if each.format == chat_format.reasoning.name)
    whole = (transcript.reasoning, transcript.content) if phase is not AFTER else ("", transcript.text)
    data = transcript.text.encode()
    cuts = range(1, len(data))
    splits = [[cut] for cut in cuts] + [[a, b] for a in cuts for b in cuts[a : a + 12]] + [list(cuts)]
    for places in splits:
        parser, decoder, message = chat_format.parser(None, phase), getincrementaldecoder("utf-8")(), ParsedMessage()
        assert parser is not None
        for start, stop in pairwise([0, *places, len(data)]):
            message.add(parser.feed([decoder.decode(data[start:stop])]))
        message.add(parser.finish())
        assert (message.reasoning, message.content) == whole, places
