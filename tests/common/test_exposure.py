"""Warnings about who can reach the server, and about keys that others can read."""

from __future__ import annotations

import pytest

from legato.common.exposure import command_line_warnings, exposure_warnings
from legato.common.options import RouterOptions


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--api-key", "secret"], 1),
        (["--api-key=secret"], 1),
        (["--api-key-file=keys"], 0),
        (["--api-key-file", "keys"], 0),
        ([], 0),
    ],
)
def test_a_key_on_the_command_line_is_warned_about_and_not_repeated(words: list[str], count: int) -> None:
    found = command_line_warnings(["text-generation-launcher", *words])
    assert len(found) == count
    assert all("API_KEY" in each and "--api-key-file" in each and "secret" not in each for each in found)


def test_a_server_without_keys_says_who_can_use_it() -> None:
    everywhere = exposure_warnings(RouterOptions(hostname="0.0.0.0"))
    assert ["--hostname 127.0.0.1" in each for each in everywhere] == [True, False]
    assert "web page" in everywhere[1] and "--cors-allow-origin" in everywhere[1]


@pytest.mark.parametrize("hostname", ["127.0.0.1", "::1", "localhost"])
def test_on_this_machine_alone_web_pages_are_the_danger(hostname: str) -> None:
    (only,) = exposure_warnings(RouterOptions(hostname=hostname))
    assert "web page" in only
    assert not exposure_warnings(RouterOptions(hostname=hostname, cors_allow_origin=("https://ours.example",)))
    assert exposure_warnings(RouterOptions(hostname=hostname, cors_allow_origin=("*",)))


@pytest.mark.parametrize("keys", [{"api_key": ("secret",)}, {"api_key_file": "keys"}])
def test_with_keys_there_is_nothing_to_say(keys: dict[str, object]) -> None:
    assert not exposure_warnings(RouterOptions(**keys))  # type: ignore[arg-type]
