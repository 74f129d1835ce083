from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from legato.chat.tools.dialects import DIALECTS, MISTRAL, dialect_of
from legato.common.options import RouterOptions

TEMPLATES = Path(__file__).parents[1] / "templates"


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("hermes.tool_use", "hermes"),
        ("qwen25", "hermes"),
        ("qwen3", "hermes"),
        ("llama31", "llama3"),
        ("mistral_v3", "mistral"),
        ("mistral_tekken", "mistral"),
        ("smollm2", "json"),
        ("chatml", "json"),
        ("llama3", "json"),
        ("gemma", "json"),
    ],
)
def test_templates_show_their_dialect(template: str, dialect: str) -> None:
    assert dialect_of((TEMPLATES / f"{template}.jinja").read_text()).name == dialect


def test_a_template_of_llama_need_not_name_the_tag() -> None:
    asks = """<|start_header_id|>{{ 'Respond with {"name": ..., ' }}{{ '"parameters": ...}.' }}"""
    assert dialect_of(asks).name == "llama3"


def test_the_flag_comes_before_the_template() -> None:
    assert dialect_of("<tool_call>", "mistral") is MISTRAL


def test_the_flag_offers_every_dialect() -> None:
    assert set(get_args(get_type_hints(RouterOptions)["tool_call_parser"])) == {"auto", *DIALECTS}
