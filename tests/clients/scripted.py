"""A server whose shard follows a script: what reasons and calls tools without a model that can."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from legato.common.sockets import free_port
from tests.integration.processes import Program
from tests.tiny_models import write_tokenizer

TEMPLATE = Path(__file__).parents[1] / "chat" / "templates" / "qwen3.jinja"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 96,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 400_000, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
# A token is a byte here.
LIMITS = (
    "--max-total-tokens=390000",
    "--max-input-tokens=380000",
    "--max-batch-prefill-tokens=390000",
    "--max-batch-size=4",
    "--payload-limit=20000000",
    "--http-workers=2",
)
# Regular expression of a prompt, and what is said to it.
Script = Sequence[tuple[str, str]]


def called(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<think>\nI need {name}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


# What the suites of `tests/clients/agents` talk about. A prompt without reasoning ends with an empty one.
CONVERSATIONS: Script = [
    (r"<tool_response>\nsunny", "<think>\nSunny.\n</think>\n\nIt is sunny in Paris."),
    (r"weather in Paris", called("get_weather", city="Paris", unit="celsius")),
    (r"patch.*goodbye", called("apply_patch", input="*** Begin Patch")),
    (r"</think>\n\n$", "Four."),
    (r"Count to a thousand", "<think>\nSo many.\n</think>\n\n" + " ".join(map(str, range(1000)))),
    (r"", "<think>\nTwo and two.\n</think>\n\nFour."),
]


@contextmanager
def scripted(folder: Path, script: Script, *arguments: str) -> Iterator[str]:
    """Its address. The first entry whose regular expression is found in the prompt answers it."""
    model, file = folder / "model", folder / "script.json"
    model.mkdir()
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "chat_template.jinja").write_text(TEMPLATE.read_text())
    file.write_text(json.dumps([{"prompt": prompt, "text": text} for prompt, text in script]))
    fake = ("--fake", f"--fake-script={file}", "--prometheus-port=0")
    with served(folder, model, *fake, *LIMITS, *arguments) as url:
        yield url


@contextmanager
def served(folder: Path, model: Path, *arguments: str, num_threads: int = 1) -> Iterator[str]:
    """The address of a launcher that answers, as a person would start it."""
    port = free_port()
    place = (f"--model-id={model}", "--hostname=127.0.0.1", f"--port={port}", f"--shard-uds-path={folder / 'shard'}")
    program = Program(folder, "text-generation-launcher", *place, *arguments, OMP_NUM_THREADS=str(num_threads))
    try:
        program.until_logged("Listening on")
        yield f"http://127.0.0.1:{port}"
        assert "Traceback" not in program.log + program.stderr
    finally:
        program.end()
