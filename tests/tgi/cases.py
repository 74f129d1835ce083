"""What TGI's integration tests send, one case for each of their snapshots: the request, and on which kind of model."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.integration.client import Client

JSON = dict[str, Any]
Call = Callable[[Client], Any]
LOAD = 4  # requests at once in the tests that TGI calls "load"


@dataclass(frozen=True)
class OracleCase:
    file: str  # of TGI's integration-tests/models, without `test_`
    test: str
    model: str  # in `MODELS`
    call: Call

    @property
    def name(self) -> str:
        return f"test_{self.file}/{self.test}"


def picture() -> str:
    """A small PNG as a data URI."""
    from PIL import Image

    file = io.BytesIO()
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# Name -> function that makes a tiny model of that kind, and the number of shards.
MODELS: dict[str, tuple[str, int]] = {
    "llama": ("tests.tgi.models:chat_llama", 1),
    "llama-schemas": ("tests.tgi.models:chat_llama", 1),  # long answers: not in `make test`
    "bloom": ("tests.models.tiny_seeds:tiny_bloom", 1),
    "bloom-sharded": ("tests.models.tiny_seeds:tiny_bloom", 2),
    "deepseek": ("tests.models.tiny_experts:tiny_deepseek", 1),
    "falcon": ("tests.models.tiny_seeds:tiny_falcon", 1),
    "gemma": ("tests.models.tiny_today:tiny_gemma", 1),
    "gemma2": ("tests.models.tiny_today:tiny_gemma2", 1),
    "gpt2": ("tests.models.tiny_seeds:tiny_gpt2", 2),
    "mistral": ("tests.models.tiny_today:tiny_mistral", 1),
    "mixtral": ("tests.models.tiny_experts:tiny_mixtral", 2),
    "neox": ("tests.models.tiny_seeds:tiny_gpt_neox", 1),
    "neox-sharded": ("tests.models.tiny_seeds:tiny_gpt_neox", 2),
    "qwen2": ("tests.models.tiny_today:tiny_qwen2", 1),
    "santacoder": ("tests.models.tiny_seeds:tiny_santacoder", 1),
    "starcoder": ("tests.models.tiny_seeds:tiny_gpt_bigcode", 2),
    "starcoder2": ("tests.models.tiny_seeds:tiny_starcoder2", 2),
    "mpt": ("tests.models.tiny_seeds:tiny_mpt", 2),
    "mt5": ("tests.models.tiny_t5:tiny_mt5", 1),
    "t5-sharded": ("tests.models.tiny_t5:tiny_flan_t5", 2),
    "mamba": ("tests.models.tiny_mamba:tiny_mamba", 1),
    "phi": ("tests.models.tiny_more:tiny_phi", 1),
    "phimoe": ("tests.models.tiny_more:tiny_phimoe", 2),
    "llava-next": ("tests.models.tiny_vision:tiny_llava_next", 1),
    "qwen2-vl": ("tests.models.tiny_vision:tiny_qwen2_vl", 1),
    "qwen2-5-vl": ("tests.models.tiny_vision:tiny_qwen2_5_vl", 1),
    "gemma3": ("tests.models.tiny_gemma_vision:tiny_gemma3_images", 2),
    "idefics": ("tests.models.tiny_cross:tiny_idefics", 2),
    "idefics2": ("tests.models.tiny_vision:tiny_idefics2", 1),
    "idefics3": ("tests.models.tiny_vision:tiny_idefics3", 1),
    "mllama": ("tests.models.tiny_cross:tiny_mllama", 2),
    "paligemma": ("tests.models.tiny_gemma_vision:tiny_paligemma", 1),
    "paligemma2": ("tests.models.tiny_gemma_vision:tiny_paligemma2", 1),
    "smolvlm": ("tests.models.tiny_vision:tiny_smolvlm", 1),
}

# ---- the native API, as TGI's Python client calls it ----------------------------------------------------------------

# All fields of the client's request, of which most are null.
PENALTIES, FILTERS = ("repetition_penalty", "frequency_penalty"), ("temperature", "top_k", "top_p", "typical_p")
OTHERS = ("best_of", "seed", "truncate", "top_n_tokens", "grammar", "adapter_id")
UNSET: JSON = dict.fromkeys((*PENALTIES, *FILTERS, *OTHERS))
DEFAULTS: JSON = {
    **UNSET,
    "details": True,
    "do_sample": False,
    "return_full_text": False,
    "stop": [],
    "watermark": False,
}
SEEDED = {"top_p": 0.9, "seed": 0}
CREATIVE = {"max_new_tokens": 60, "temperature": 0.2, "top_p": 0.95, "seed": 0}
EVERYTHING: JSON = {
    "repetition_penalty": 1.2,
    "return_full_text": True,
    "stop": ["test"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 10,
    "truncate": 5,
    "typical_p": 0.9,
    "watermark": True,
    "seed": 0,
}


def native(client: Client, prompt: str, **parameters: Any) -> JSON:
    asked = {**DEFAULTS, "max_new_tokens": 10, "decoder_input_details": True, **parameters}
    answer = client.post("/", {"inputs": prompt, "parameters": asked, "stream": False})
    assert answer.status == 200, answer.body
    (found,) = answer.json()
    assert 1 <= found["details"]["generated_tokens"] <= asked["max_new_tokens"]
    return dict(found)


def one(prompt: str, **parameters: Any) -> Call:
    return lambda client: native(client, prompt, **parameters)


def load(prompt: str, **parameters: Any) -> Call:
    def call(client: Client) -> list[JSON]:
        with ThreadPoolExecutor(LOAD) as threads:
            answers = list(threads.map(lambda _: native(client, prompt, **parameters), range(LOAD)))
        assert len({answer["generated_text"] for answer in answers}) == 1, "a batch changed a greedy text"
        return answers

    return call


def usual(file: str, model: str, prompt: str, *ends: str, prefix: str = "", **parameters: Any) -> list[OracleCase]:
    """The tests that most files have, by the ends of their names."""
    kinds = {"_all_params": EVERYTHING, "_default_params": CREATIVE}
    return [
        OracleCase(
            file,
            f"{prefix or f'test_{file}'}{end}",
            model,
            load(prompt) if end == "_load" else one(prompt, **kinds.get(end, parameters)),
        )
        for end in ends
    ]


HELLO, DEEP, TEST = "def print_hello", "What is deep learning?", "Test request"
ORTOLAN, SKY = "Pour déguster un ortolan, il faut tout d'abord", "Why is the sky blue?"
GIRAFFE = "Girafatron is obsessed with giraffes, the most glorious animal on the face of this Earth."
GRADIENT = "What is gradient descent?\n\n"
NITROGEN = "Please answer the following question. What is the boiling point of Nitrogen?"
ALL, CODE = ("", "_all_params", "_load"), ("", "_default_params", "_load")
NATIVE = [
    *usual("bloom_560m", "bloom", ORTOLAN, *ALL, **SEEDED),
    *usual("bloom_560m_sharded", "bloom-sharded", ORTOLAN, "", "_load", **SEEDED),
    *usual("flash_deepseek_v2", "deepseek", TEST, *ALL),
    *usual("flash_falcon", "falcon", GIRAFFE, *ALL),
    *usual("flash_gemma", "gemma", TEST, "_simple", "_all_params", "_load"),
    *usual("flash_gemma2", "gemma2", TEST, "", "_load"),
    *usual("flash_gpt2", "gpt2", DEEP, "", "_load"),
    *usual("flash_llama", "llama", TEST, "_simple", "_all_params", "_load"),
    *usual("flash_mistral", "mistral", TEST, *ALL),
    *usual("flash_mixtral", "mixtral", DEEP, *ALL),
    *usual("flash_neox", "neox", DEEP, "", "_load"),
    *usual("flash_neox_sharded", "neox-sharded", DEEP, "", "_load", prefix="test_flash_neox"),
    *usual("flash_qwen2", "qwen2", TEST, *ALL),
    *usual("flash_santacoder", "santacoder", HELLO, "", "_load"),
    *usual("flash_starcoder", "starcoder", HELLO, *CODE),
    *usual("flash_starcoder2", "starcoder2", HELLO, *CODE),
    *usual("mpt", "mpt", DEEP, "", "_load", max_new_tokens=17),
    *usual("mt0_base", "mt5", SKY, *ALL, **SEEDED),
    *usual("t5_sharded", "t5-sharded", NITROGEN, "", "_load"),
    *usual("mamba", "mamba", DEEP, *ALL),
    *usual("flash_phi", "phi", TEST, *ALL),
    *usual("flash_phi35_moe", "phimoe", GRADIENT, *ALL),
]

# ---- grammars -------------------------------------------------------------------------------------------------------

NAMES = {name: {"type": "string"} for name in ("firstName", "lastName", "hobby")}
PERSON: JSON = {
    "type": "object",
    "$id": "https://example.com/person.schema.json",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "properties": {**NAMES, "numCats": {"type": "integer", "minimum": 0}},
    "required": ["firstName", "lastName", "hobby", "numCats"],
}
ADDRESS: JSON = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "postalCode": {"type": "string"}},
    "required": ["street", "city"],
}
COMPLEX: JSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "address": ADDRESS,
        "hobbies": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "required": ["name", "age", "hobbies"],
}
WEATHER: JSON = {
    "title": "Weather",
    "type": "object",
    "properties": {"unit": {"type": "string"}, "temperature": {"type": "array", "items": {"type": "integer"}}},
    "required": ["unit", "temperature"],
}
IP = "((25[0-5]|2[0-4]\\d|[01]?\\d\\d?)\\.){3}(25[0-5]|2[0-4]\\d|[01]?\\d\\d?)"
DAVID = "info: david holtz like trees and has two cats. "
EMAIL = {"type": "regex", "value": "[\\w-]+@([\\w-]+\\.)+[\\w-]+"}
GRAMMARS = [
    OracleCase("flash_grammar_llama", "test_flash_llama_grammar", "llama", one(TEST)),
    OracleCase("flash_grammar_llama", "test_flash_llama_grammar_regex", "llama",
               one("Whats Googles DNS", seed=0, grammar={"type": "regex", "value": IP})),
    OracleCase("flash_grammar_llama", "test_flash_llama_grammar_json", "llama",
               one(DAVID, max_new_tokens=100, seed=0, grammar={"type": "json", "value": PERSON})),
    OracleCase("flash_grammar_llama", "test_flash_llama_grammar_load", "llama",
               load("name: david. email:  ", stop=[".com"], grammar=EMAIL)),
    OracleCase("flash_grammar_llama", "test_flash_llama_grammar_single_load_instance", "llama",
               one("name: david. email:  ", stop=[".com"], grammar=EMAIL)),
    OracleCase("grammar_llama", "test_non_flash_llama_grammar_json", "llama",
               one(DAVID, max_new_tokens=100, seed=0, grammar={"type": "json", "value": PERSON})),
]  # fmt: skip
