"""The scripted output of a fake shard (`--fake-script`), to test programs that use tools without a model.

    [{"prompt": "<tool_response>\\\\nok", "text": "Done."},
     {"prompt": "", "text": "<tool_call>\\\\n{\\"name\\": \\"write\\", \\"arguments\\": {…}}\\\\n</tool_call>"}]

The first entry counts whose regular expression is found in the prompt, special tokens included.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from legato.common.errors import OptionError
from legato.modelfiles.files import ModelFiles
from legato.server.fake.shard import Script


class ScriptEntry(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    text: str


def read_script(path: str, files: ModelFiles) -> Script:
    try:
        entries = msgspec.json.decode(Path(path).read_bytes(), type=list[ScriptEntry])
        rules = [(re.compile(entry.prompt, re.DOTALL), entry.text) for entry in entries]
    except (OSError, msgspec.MsgspecError, re.error) as error:
        raise OptionError(f"--fake-script: {path}: {error}") from None
    tokenizer, ends = files.tokenizer(), files.eos_token_ids()

    def answer(prompt: list[int]) -> list[int]:
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        for pattern, said in rules:
            if pattern.search(text):
                return [*tokenizer.encode(said, add_special_tokens=False).ids, *ends[:1]]
        return []

    return answer
