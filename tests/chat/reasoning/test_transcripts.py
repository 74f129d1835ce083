"""What models of ten families say, cut in every place: reasoning, answer and calls are always the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from legato.chat.answers import AnswerParser
from legato.chat.reasoning.formats import REASONING_FORMATS, Phase
from legato.chat.reasoning.harmony import HarmonyParser
from legato.chat.reasoning.tagged import TagParser
from legato.chat.tools.dialects import HERMES, MISTRAL
from legato.chat.tools.parser import CallParser, ParsedMessage

CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'
ARGUMENTS = '{"city": "Zürich"}'


@dataclass(frozen=True)
class Transcript:
    format: str
    text: str
    reasoning: str
    content: str
    # What the prompt ends with.
    prompt: str = "<|assistant|>\n"
    calls: list[str] = field(default_factory=list)


TRANSCRIPTS = {
    "Qwen3": Transcript("qwen3", "<think>\nA < B, so…\n</think>\n\nB 😀", "A < B, so…", "B 😀"),
    "Qwen3, switched off": Transcript(
        "qwen3", "Just <think> about it", "", "Just <think> about it", prompt="<think>\n\n</think>\n\n"
    ),
    "Qwen3 without reasoning": Transcript("qwen3", "No need to.</think>", "", "No need to.</think>"),
    "Qwen3 with a call": Transcript(
        "qwen3", f"<think>\nhm\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", "hm", "", calls=[ARGUMENTS]
    ),
    "Qwen3, cut off": Transcript("qwen3", "<think>\nand so </thin", "and so </thin", ""),
    "Qwen3 whose template opens": Transcript("qwen3", "hm\n</think>\n\nB", "hm", "B", prompt="assistant\n<think>\n"),
    "DeepSeek R1": Transcript("deepseek_r1", "First, 1 < 2.\n</think>\n\nYes.", "First, 1 < 2.", "Yes."),
    "DeepSeek R1, tag repeated": Transcript(
        "deepseek_r1", "<think>\nFirst.\n</think>\n\nYes.", "First.", "Yes.", prompt="<think>\n"
    ),
    "DeepSeek R1, cut off": Transcript("deepseek_r1", "First, and then", "First, and then", ""),
    "Seed-OSS": Transcript(
        "seed_oss", "<seed:think>Budget: 5</seed:budget></seed:think>\n7", "Budget: 5</seed:budget>", "7"
    ),
    "Magistral": Transcript("mistral", "[THINK]a [b] c[/THINK]The answer [1]", "a [b] c", "The answer [1]"),
    "Magistral with a call": Transcript("mistral", f"[THINK]a[/THINK][TOOL_CALLS][{CALL}]", "a", "", calls=[ARGUMENTS]),
    "Command A": Transcript("command_a", "<|START_THINKING|>je pense<|END_THINKING|><|x|>Oui", "je pense", "<|x|>Oui"),
    "Kimi-VL": Transcript("kimi_vl", "◁think▷图◁/thin ◁/think▷答案", "图◁/thin", "答案"),
    "MedGemma": Transcript("medgemma", "<unused94>thought\nfever<unused95>Rest.", "fever", "Rest."),
    "Gemma 4": Transcript("gemma4", "<|channel>thought\nfirst\n<channel|>Then.", "first", "Then."),
    "Granite 3.2": Transcript(
        "granite",
        "Here is my thought process:\nHere is my idea.\n\nHere is my response:\n\nIt is 4.",
        "Here is my idea.",
        "It is 4.",
    ),
    "Granite 3.2, contracted": Transcript("granite", "Here's my thought process: x Here's my response: y", "x", "y"),
    "Granite 3.2 without": Transcript("granite", "Here is my answer: 4", "", "Here is my answer: 4"),
    "gpt-oss": Transcript(
        "gpt_oss",
        "<|channel|>analysis<|message|>2 < 3 <|x<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>",
        "2 < 3 <|x",
        "Yes <b>",
    ),
    "gpt-oss with a preamble and calls": Transcript(
        "gpt_oss",
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        + ARGUMENTS
        + "<|call|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        + ARGUMENTS,
        "Two.",
        "Let me look.",
        calls=[ARGUMENTS, ARGUMENTS],
    ),
    "gpt-oss, cut off": Transcript("gpt_oss", "<|channel|>analysis<|message|>So <|en", "So <|en", ""),
    "gpt-oss that forgets its channels": Transcript("gpt_oss", "Plain text.", "", "Plain text."),
}


def parser_for(transcript: Transcript) -> AnswerParser:
    format = REASONING_FORMATS[transcript.format]
    phase = format.phase_after(transcript.prompt)
    if format.channels:
        return AnswerParser(HarmonyParser({"weather"}, phase=phase), None)
    dialect = MISTRAL if transcript.format == "mistral" else HERMES
    calls = CallParser(dialect, {"weather"}) if transcript.calls else None
    return AnswerParser(TagParser(format, phase), calls)


def parsed(transcript: Transcript, cuts: list[int]) -> ParsedMessage:
    parser, message = parser_for(transcript), ParsedMessage()
    places = [0, *cuts, len(transcript.text)]
    for start, stop in pairwise(places):
        message.add(parser.feed([transcript.text[start:stop]]))
    message.add(parser.finish())
    assert parser.has_calls == bool(transcript.calls)
    return message


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_parts_do_not_depend_on_where_the_text_is_cut(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    size, rng = len(transcript.text), random.Random(1)
    splits = [[], list(range(1, size)), *([cut] for cut in range(1, size))]
    if not transcript.calls:  # calls are read character by character, which takes its time
        splits += [[a, b] for a in range(1, size) for b in range(a + 1, min(size, a + 16))]
    splits += [sorted(rng.sample(range(1, size), rng.randrange(1, size // 2))) for _ in range(50)]
    for cuts in splits:
        message = parsed(transcript, cuts)
        assert (message.reasoning, message.content) == (transcript.reasoning, transcript.content), cuts
        assert [call.arguments for call in message.calls] == transcript.calls, cuts


def test_families_of_every_shape_are_among_them() -> None:
    assert {transcript.format for transcript in TRANSCRIPTS.values()} == REASONING_FORMATS.keys()


def test_tokens_of_the_reasoning_are_counted_with_its_markers() -> None:
    parser = AnswerParser(TagParser(REASONING_FORMATS["qwen3"], Phase.BEFORE), None)
    parser.feed(["<think>", "a", "b", "</think>", "c", "d"])
    parser.finish()
    assert parser.num_reasoning_tokens == 4


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_message_that_is_continued_goes_on_where_it_is(name: str) -> None:
    format = REASONING_FORMATS[name]
    assert format.phase_after("…", "<think>\nI was") is Phase.INSIDE
    assert format.phase_after("…", "<think>\nI was\n</think>\n\nSo") is Phase.AFTER
    assert format.phase_after("…", "So") is (Phase.INSIDE if name == "deepseek_r1" else Phase.AFTER)
