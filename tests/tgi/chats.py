"""The cases of TGI's chat and completion tests, with pictures and tools."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.integration.client import Client
from tests.tgi.cases import COMPLEX, EVERYTHING, JSON, PERSON, WEATHER, Call, OracleCase, load, one, picture

SYSTEM = {"role": "system", "content": "Youre a helpful assistant! Answer the users question best you can."}
WEATHER_QUESTION = {"role": "user", "content": "What is the weather like in Brooklyn, New York?"}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def user(text: str) -> JSON:
    return {"role": "user", "content": text}


def posted(path: str, **body: Any) -> Call:
    def call(client: Client) -> JSON:
        answer = client.post(path, {"model": "tgi", **body})
        assert answer.status == 200, answer.body
        found: JSON = answer.json()
        assert found["model"] != "tgi"
        return found

    return call


def streamed(path: str, **body: Any) -> Call:
    """The events without the last, which is `[DONE]`."""

    def call(client: Client) -> list[JSON]:
        answer = client.post(path, {"model": "tgi", "stream": True, **body})
        assert answer.status == 200, answer.body
        *events, done = [frame[6:] for frame in answer.body.decode().split("\n\n") if frame.startswith("data: ")]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    return call


def chat(*messages: JSON, **body: Any) -> Call:
    return posted(CHATS, messages=list(messages), **body)


def chat_stream(*messages: JSON, **body: Any) -> Call:
    return streamed(CHATS, messages=list(messages), **body)


def chats_at_once(*questions: str, **body: Any) -> Call:
    def call(client: Client) -> list[JSON]:
        with ThreadPoolExecutor(len(questions)) as threads:
            return list(threads.map(lambda text: chat(user(text), **body)(client), questions))

    return call


ELEPHANT = [{"role": "system", "content": "system message"}, user("Which is bigger an elephant or a mouse?")]
SIMPLE = [
    OracleCase("chat_llama", "test_flash_llama_simple", "llama",
               chat(SYSTEM, WEATHER_QUESTION, max_tokens=100, seed=1)),
    OracleCase("continue_final_message", "test_llama_completion_single_prompt", "llama",
               chat(*ELEPHANT, max_tokens=30, stream=False, seed=1337)),
    OracleCase("continue_final_message", "test_llama_completion_single_prompt_continue", "llama",
               chat(*ELEPHANT, {"role": "assistant", "content": "the elephant, but have you heard about"},
                    max_tokens=30, stream=False, seed=1337)),
]  # fmt: skip

QUESTIONS = ("explane more", "Poly Ether Ether Ketone", "this is not less code this is java")
PREFIXED = OracleCase(
    "flash_llama_prefix", "test_flash_llama_load", "llama", chats_at_once(*QUESTIONS, max_tokens=10, temperature=0)
)

# ---- completions and usage ------------------------------------------------------------------------------------------

FILE = "completion_prompts"
PROMPTS = ["What is Deep Learning?", "Is water wet?", "What is the capital of France?", "def mai"]
GREEDY = {"max_tokens": 10, "temperature": 0.0}
SAY_OK = {"max_tokens": 10, "seed": 42}
USAGE, NO_USAGE = {"include_usage": True}, {"include_usage": False}
COMPLETED = [
    OracleCase(FILE, "test_flash_llama_completion_single_prompt", "llama",
               posted(COMPLETIONS, prompt=PROMPTS[0], **GREEDY)),
    OracleCase(FILE, "test_flash_llama_completion_many_prompts", "llama",
               posted(COMPLETIONS, prompt=PROMPTS, seed=0, **GREEDY)),
    OracleCase(FILE, "test_flash_llama_completion_many_prompts_stream", "llama",
               streamed(COMPLETIONS, prompt=PROMPTS, seed=0, **GREEDY)),
    OracleCase(FILE, "test_flash_llama_completion_stream_usage", "llama",
               chat_stream(user(PROMPTS[0]), stream_options=USAGE, **GREEDY)),
    *(OracleCase(FILE, f"test_chat_{who}_{what}", "llama",
                 chat_stream(user("Say 'OK!'"), stream_options=options, **SAY_OK))
      for who in ("openai", "hfhub") for what, options in (("usage", USAGE), ("nousage", NO_USAGE))),
]  # fmt: skip

# ---- response_format and tools --------------------------------------------------------------------------------------


def schema(name: str, value: JSON) -> JSON:
    return {"type": "json_schema", "value": {"name": name, "strict": True, "schema": value}}


FORMATTED = [
    OracleCase("grammar_response_format_llama", "test_grammar_response_format_llama_json", "llama-schemas",
               chat(user("What's the weather like the next 3 days?"), seed=42, max_tokens=500,
                    response_format={"type": "json_object", "value": WEATHER})),
    OracleCase("json_schema_constrain", "test_json_schema_basic", "llama-schemas",
               chat(user("David has 2 cats."), seed=42, temperature=0.0, response_format=schema("person", PERSON))),
    OracleCase("json_schema_constrain", "test_json_schema_complex", "llama-schemas",
               chat(user("John Smith is 30."), seed=42, temperature=0.0, response_format=schema("complex", COMPLEX))),
    OracleCase("json_schema_constrain", "test_json_schema_stream", "llama-schemas",
               chat_stream(user("David has 2 cats."), seed=42, temperature=0.0,
                           response_format=schema("person", PERSON))),
]  # fmt: skip

PLACE: JSON = {
    "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
    "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "The temperature unit to use."},
}
DAYS: JSON = {"num_days": {"type": "integer", "description": "The number of days to forecast"}}


def tool(name: str, description: str, properties: JSON) -> JSON:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("get_current_weather", "Get the current weather", PLACE),
    tool("get_n_day_weather_forecast", "Get an N-day weather forecast", PLACE | DAYS),
]
CHOSEN: JSON = {"max_tokens": 100, "seed": 1, "tools": TOOLS, "temperature": 0.0, "tool_choice": "get_current_weather"}
AUTO: JSON = {"max_tokens": 20, "seed": 24, "tools": TOOLS, "tool_choice": "auto"}
WHO = user("Who are you?")
PREFIX = "test_flash_llama_grammar_tools_"
CALLED = [
    OracleCase("tools_llama", f"{PREFIX}choice_nostream", "llama", chat(SYSTEM, WEATHER_QUESTION, **CHOSEN)),
    OracleCase("tools_llama", f"{PREFIX}choice_stream", "llama", chat_stream(SYSTEM, WEATHER_QUESTION, **CHOSEN)),
    OracleCase("tools_llama", f"{PREFIX}insufficient_information_nostream", "llama", chat(SYSTEM, WHO, **AUTO)),
    OracleCase("tools_llama", f"{PREFIX}insufficient_information_stream", "llama", chat_stream(SYSTEM, WHO, **AUTO)),
]

# ---- pictures -------------------------------------------------------------------------------------------------------

STORY = "Can you tell me a very short story based on the image?"
BOTH = f"User:![]({picture()})![]({picture()})Where are the cow and chicken?<end_of_utterance> \nAssistant:"
WHAT = f"User:![]({picture()})What is in this image?<end_of_utterance>\nAssistant:"


def looking(text: str) -> JSON:
    parts = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


SEEN = [
    OracleCase("llava_next", "test_flash_llava_next_simple", "llava-next", one(f"User:![]({picture()}){STORY}")),
    OracleCase("llava_next", "test_flash_llava_next_load", "llava-next", load(f"User:![]({picture()}){STORY}")),
    OracleCase("flash_qwen2_vl", "test_flash_qwen2_vl_simple", "qwen2-vl",
               chat(looking("Describe this image."), seed=42, max_tokens=20)),
    OracleCase("flash_qwen2_vl", "test_flash_qwen2_vl_simple_streaming", "qwen2-vl",
               chat_stream(looking("Describe this image."), seed=42, max_tokens=20)),
    OracleCase("flash_qwen2_5_vl", "test_flash_qwen2_5_vl_simple", "qwen2-5-vl",
               chat(looking("Describe this image."), seed=42, max_tokens=20)),
    OracleCase("flash_qwen2_5_vl", "test_flash_qwen2_5_vl_simple_streaming", "qwen2-5-vl",
               chat_stream(looking("Describe this image."), seed=42, max_tokens=20)),
    OracleCase("flash_gemma3", "test_flash_gemma3_image_cow", "gemma3",
               chat(looking("What is shown in this image?"), seed=42, max_tokens=20)),
    OracleCase("idefics", "test_idefics", "idefics", one(f"User:![]({picture()}){STORY}")),
    OracleCase("idefics", "test_idefics_two_images", "idefics", one(BOTH, max_new_tokens=20)),
    OracleCase("idefics", "test_idefics_load", "idefics", load(f"User:![]({picture()}){STORY}")),
    OracleCase("idefics2", "test_flash_idefics2_next_simple", "idefics2", one(f"User:![]({picture()}){STORY}")),
    OracleCase("idefics2", "test_flash_idefics2_two_images", "idefics2", one(BOTH, max_new_tokens=20)),
    OracleCase("idefics2", "test_flash_idefics2_next_all_params", "idefics2", one("Test request", **EVERYTHING)),
    OracleCase("idefics2", "test_flash_idefics2_next_load", "idefics2", load(f"User:![]({picture()}){STORY}")),
    OracleCase("idefics3", "test_flash_idefics3_next_simple_url", "idefics3", one(WHAT, seed=1337)),
    OracleCase("smolvlm", "test_flash_smolvlm_next_simple_url", "smolvlm", one(WHAT, seed=1337)),
    OracleCase("mllama", "test_mllama_simpl", "mllama",
               chat(looking("Describe the image in 10 words."), temperature=0.0, max_tokens=10)),
    OracleCase("flash_pali_gemma", "test_flash_pali_gemma", "paligemma",
               one(f"![]({picture()})Where is the cow standing?\n", max_new_tokens=20)),
    OracleCase("flash_pali_gemma", "test_flash_pali_gemma_two_images", "paligemma",
               one(f"caption![]({picture()})![]({picture()})\n", max_new_tokens=20)),
    OracleCase("flash_pali_gemma2", "test_flash_pali_gemma_image", "paligemma2",
               one(f"![]({picture()})", max_new_tokens=20)),
]  # fmt: skip

CHAT_CASES = [*SIMPLE, PREFIXED, *COMPLETED, *FORMATTED, *CALLED, *SEEN]
