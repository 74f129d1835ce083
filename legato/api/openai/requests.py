"""The JSON that OpenAI's routes take. Unknown fields are ignored, and `null` means the default everywhere.

Types are checked while parsing, values in `terms.py` and with the route that they belong to. Fields below "extensions"
are not OpenAI's: clients of other engines send them.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from legato.api.native import GRAMMAR_SHAPE, U32, none_for_null

Flag = bool | None
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
Count = Annotated[U32 | None, Meta(extra_json_schema={"minimum": 1})]
Penalty = Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
# What a message must have, for the reader of the documentation; templates may use more, so nothing is dropped.
Message = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "required": ["role"],
            "properties": {
                "role": {"type": "string", "examples": ["system", "user", "assistant"]},
                "content": {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
                },
            },
        }
    ),
]
# A function with a JSON schema. Chat templates may know more fields, so nothing is dropped.
ToolDescription = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "required": ["function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                    },
                },
            },
        }
    ),
]


class StreamOptions(Struct, kw_only=True, frozen=True):
    include_usage: Annotated[Flag, Meta(description="Send the usage in a last chunk without choices.")] = False
    continuous_usage_stats: Annotated[
        Flag, Meta(description="Send the usage so far with every chunk, besides `include_usage`.")
    ] = False


class SharedFields(Struct, kw_only=True, frozen=True):
    """What both routes take."""

    model: Annotated[str | None, Meta(description="Any name: there is one model, and the answer repeats it.")] = None
    frequency_penalty: Annotated[
        Penalty, Meta(description="Lowers tokens by this much for every time they were generated.")
    ] = None
    presence_penalty: Annotated[Penalty, Meta(description="Lowers tokens that were generated at all.")] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        Meta(description="Token id to a number between -100 and 100 that is added to its logit."),
    ] = None
    n: Annotated[Count, Meta(description="How many answers.")] = None
    seed: Annotated[int | None, Meta(description="Makes sampling repeatable; random if not given.")] = None
    stop: Annotated[str | list[str] | None, Meta(description="One or more strings before which the text ends.")] = None
    stream: Annotated[Flag, Meta(description="Send server-sent events as the text grows.")] = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[
        float | None,
        Meta(description="1.0 if not given; 0 takes the most likely token.", extra_json_schema={"minimum": 0}),
    ] = None
    top_p: Annotated[
        float | None,
        Meta(
            description="Sample from the most likely tokens that together reach this probability.",
            extra_json_schema={"minimum": 0, "maximum": 1},
        ),
    ] = None
    user: Annotated[str | None, Meta(description="Accepted, and not used.")] = None

    # ---- extensions -----------------------------------------------------------------------------------------------

    top_k: Annotated[int | None, Meta(description="Sample from the k most likely tokens; 0 or -1 is off.")] = None
    min_p: Annotated[
        float | None, Meta(description="Drop tokens less likely than this share of the most likely one.")
    ] = None
    typical_p: Annotated[float | None, Meta(description="Locally typical sampling.")] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="1.0 is none; divides the positive logits of tokens seen before.")
    ] = None
    ignore_eos: Annotated[Flag, Meta(description="Go on after an end-of-sequence token.")] = False
    min_tokens: Annotated[
        U32 | None, Meta(description="No end token, stop token or stop string before this many tokens.")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, Meta(description="Tokens that end the text, and are no part of it.")
    ] = None
    response_format: Annotated[
        Raw,  # decoded when its size is known
        Meta(
            extra_json_schema={"anyOf": [GRAMMAR_SHAPE, {"type": "null"}]},
            description="What the text must look like: `text`, `json_object`, `json_schema`, `regex`, `choice` or "
            "`lark`, in OpenAI's shape or in TGI's.",
        ),
    ] = None  # type: ignore[assignment]
    priority: Annotated[
        int | None,
        Meta(
            description="Priority in the queue, from 0 (first) to 9, as far as the API key allows it. Default: 5.",
            extra_json_schema={"minimum": 0, "maximum": 9},
        ),
    ] = None
    echo: Annotated[Flag, Meta(description="Put the prompt, or the message that is continued, before the text.")] = (
        False
    )

    def __post_init__(self) -> None:
        none_for_null(self, "response_format")


class CompletionRequest(SharedFields, kw_only=True, frozen=True):
    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A text, or the ids of its tokens; or a list of either."),
    ]
    best_of: Annotated[
        Count, Meta(description="Generate this many answers and return the `n` with the best mean logprob.")
    ] = None
    logprobs: Annotated[
        int | None, Meta(description="Logprobs of the tokens, and of this many most likely ones (up to 20).")
    ] = None
    max_tokens: Annotated[
        U32 | None, Meta(description="At most this many tokens; as many as fit if not given. 0 with `echo` only.")
    ] = None
    suffix: Annotated[str | None, Meta(description="Not supported: refused unless empty.")] = None


class ChatRequest(SharedFields, kw_only=True, frozen=True):
    messages: Annotated[list[Message], Meta(description="The conversation, as the model's chat template takes it.")]
    logprobs: Annotated[Flag, Meta(description="Logprobs of the tokens.")] = False
    top_logprobs: Annotated[
        int | None, Meta(description="Logprobs of this many most likely tokens too (up to 20), with `logprobs`.")
    ] = None
    max_tokens: Annotated[Count, Meta(description="The older name of `max_completion_tokens`.")] = None
    max_completion_tokens: Annotated[
        Count, Meta(description="At most this many tokens; as many as fit if not given.")
    ] = None
    tools: Annotated[
        list[ToolDescription] | None, Meta(description="Functions that the model may call; the client runs them.")
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(
            description='`auto`, `none`, `required`, or the tool to call: `{"type": "function", "function": '
            '{"name": ...}}` or just its name; `{"type": "allowed_tools", ...}` for some of them. A call that is asked '
            "for follows the tool's schema."
        ),
    ] = None
    parallel_tool_calls: Annotated[
        Flag, Meta(description="Whether one answer may call several tools; if not given, as the model is used to.")
    ] = None

    # ---- extensions -----------------------------------------------------------------------------------------------

    tool_prompt: Annotated[
        str | None, Meta(description="What to tell the model about the tools, at the end of the user's last message.")
    ] = None
    add_generation_prompt: Annotated[
        Flag,
        Meta(description="Let the model begin a message of its own; by default unless the last one is continued."),
    ] = None
    continue_final_message: Annotated[
        Flag, Meta(description="Let the model go on with the last message; by default if it is the assistant's.")
    ] = None
    reasoning_effort: Annotated[
        str | None,
        Meta(
            description="How much a model that reasons may do so before it answers; `none` switches it off, where the "
            "chat template can. Templates that do not know efforts get a budget: 512 tokens for `minimal`, 2048 for "
            "`low`, 8192 for `medium`.",
            extra_json_schema={"enum": [*EFFORTS, None]},
        ),
    ] = None
    thinking_token_budget: Annotated[
        U32 | None, Meta(description="At most this many tokens of reasoning; then the model has to answer.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Variables for the chat template, such as `enable_thinking`.")
    ] = None
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="For chat templates that quote documents.")] = (
        None
    )


class LoadAdapterRequest(Struct, kw_only=True):
    """vLLM's, and a revision."""

    lora_name: Annotated[str, Meta(description="What requests will call it, as `model` or `adapter_id`.")]
    lora_path: Annotated[
        str, Meta(description="A folder, absolute, or the id of a Hub repository; within `--lora-allow`.")
    ]
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of the Hub repository.")] = None
    load_inplace: Annotated[Flag, Meta(description="Not supported: unload the adapter of that name first.")] = None


class UnloadAdapterRequest(Struct, kw_only=True):
    lora_name: str
