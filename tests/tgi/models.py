"""The tiny model of the chat tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny_models import tiny_llama

# Short: every byte is a token. Tools are in it, as in the templates of models that were trained with them.
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}"
    "{%- for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{%- if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_llama(folder: Path, **changes: Any) -> Path:
    tiny_llama(folder, **{"max_position_embeddings": 4096, **changes})
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
