"""TGI's variables that Legato has no option for are used or reported."""

from __future__ import annotations

import pytest

from legato.common.tgi_variables import adopt_token, variable_warnings, without_idle


def test_a_variable_without_effect_is_reported_by_name_and_reason() -> None:
    (warning,) = variable_warnings({"ATTENTION": "flashinfer", "PATH": "/bin"})
    assert warning.startswith("ATTENTION has no effect: ") and "attention" in warning.partition(":")[2]


def test_an_empty_variable_counts_as_unset() -> None:
    assert variable_warnings({"ATTENTION": "", "TGI_WIGGLE_ROOM": "", "USE_FLASH_ATTENTION": ""}) == []


@pytest.mark.parametrize(
    ("value", "warns"), [("1", False), ("true", False), ("True", False), ("0", True), ("false", True)]
)
def test_what_is_always_so_is_reported_only_if_the_opposite_is_asked_for(value: str, warns: bool) -> None:
    assert bool(variable_warnings({"PREFILL_CHUNKING": value})) is warns


def test_children_do_not_report_again() -> None:
    environ = {"ATTENTION": "paged", "PREFILL_CHUNKING": "0", "PATH": "/bin"}
    assert variable_warnings(without_idle(environ)) == []
    assert without_idle(environ) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("environ", "token"),
    [
        ({"HF_API_TOKEN": "a"}, "a"),
        ({"HF_API_TOKEN": "a", "HF_TOKEN": "b"}, "b"),
        ({"HF_API_TOKEN": "", "HF_TOKEN": ""}, ""),
        ({}, None),
    ],
)
def test_the_hub_token_of_tgi_is_used_unless_there_is_another(environ: dict[str, str], token: str | None) -> None:
    adopt_token(environ)
    assert environ.get("HF_TOKEN") == token
