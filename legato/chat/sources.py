"""Finds the chat template among the model's files and options.

    --tokenizer-config-path      a file that replaces the model's own
    chat_template.jinja          with additional_chat_templates/NAME.jinja beside it
    chat_template.json           as processors used to write it
    tokenizer_config.json        a string, or a list of named templates
    processor_config.json
    the metadata of a GGUF file

The first that has one is used, whole; `ModelFiles` knows the order of the model's own. The special tokens that
templates name come from the tokenizer's configuration wherever the template was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.common.errors import ModelFileError, OptionError
from legato.modelfiles.files import ModelFiles, read_json, with_plain_tokens

FLAG = "--tokenizer-config-path"


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    # The file, for people.
    source: str
    # "default", and "tool_use" where there is another one for tools.
    templates: dict[str, str]
    # bos_token and its like.
    special_tokens: dict[str, str]


def find_templates(files: ModelFiles, tokenizer_config_path: Path | None = None) -> ChatTemplates | None:
    config = files.tokenizer_config()
    found = files.chat_template()
    if tokenizer_config_path is not None:
        override = _read_override(tokenizer_config_path)
        config = {**config, **override}
        if override.get("chat_template") is not None:
            found = str(tokenizer_config_path), override["chat_template"]
    if found is None:
        return None
    source, written = found
    return ChatTemplates(source, _by_name(source, written), _special_tokens(config))


def _read_override(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise OptionError(f"{FLAG}: {path} does not exist; give the path of a tokenizer_config.json")
    try:
        return with_plain_tokens(read_json(path))
    except ModelFileError as error:
        raise OptionError(f"{FLAG}: {error}") from None


def _by_name(source: str, written: Any) -> dict[str, str]:
    """One template is the default; several are a list of objects, or an object from name to template."""
    if isinstance(written, str):
        return {"default": written}
    try:
        named = written if isinstance(written, dict) else {entry["name"]: entry["template"] for entry in written}
    except (TypeError, KeyError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ModelFileError(f"{source}: chat_template must be a string or a list of objects with name and template")
    return named


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens that transformers would give to the template: all that have a name."""
    extra: dict[str, Any] = {}
    for group in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(group), dict):
            extra |= with_plain_tokens(config[group], suffix="")
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    return {name: token for name, token in (named | extra).items() if isinstance(token, str)}
