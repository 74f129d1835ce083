"""Request bodies of OpenAI's routes. Unknown fields are ignored, and `null` means the default everywhere.

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
        Flag, Meta(description="With `include_usage`, also send the usage so far with every chunk.")
    ] = False


class SharedFields(Struct, kw_only=True, frozen=True):
    """What both routes take."""

    model: Annotated[str | None, Meta(description="Any name, or the name of a LoRA adapter.")] = None
    frequency_penalty: Annotated[
        Penalty, Meta(description="Subtracted from a token's logit for every time it was generated.")
    ] = None
    presence_penalty: Annotated[
        Penalty, Meta(description="Subtracted from the logits of tokens that were generated at least once.")
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        Meta(description="Maps token ids to values between -100 and 100, which are added to their logits."),
    ] = None
    n: Annotated[Count, Meta(description="Number of choices.")] = None
    seed: Annotated[int | None, Meta(description="Makes sampling reproducible. Default: random.")] = None
    stop: Annotated[
        str | list[str] | None, Meta(description="One or more stop strings; the text ends before them.")
    ] = None
    stream: Annotated[Flag, Meta(description="Stream the text as server-sent events.")] = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[
        float | None,
        Meta(
            description="Divides the logits before sampling. Default: 1.0; 0 is greedy decoding.",
            extra_json_schema={"minimum": 0},
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Meta(
            description="Sample from the most likely tokens that together reach this probability.",
            extra_json_schema={"minimum": 0, "maximum": 1},
        ),
    ] = None
    user: Annotated[str | None, Meta(description="Accepted and ignored.")] = None

    # ---- extensions -----------------------------------------------------------------------------------------------

    top_k: Annotated[int | None, Meta(description="Sample from the k most likely tokens; 0 or -1 disables it.")] = None
    min_p: Annotated[
        float | None,
        Meta(description="Drop tokens whose probability is below this fraction of that of the most likely token."),
    ] = None
    typical_p: Annotated[float | None, Meta(description="Locally typical sampling.")] = None
    repetition_penalty: Annotated[
        float | None,
        Meta(description="Divides the positive logits of tokens that occurred before; 1.0 means no penalty."),
    ] = None
    ignore_eos: Annotated[Flag, Meta(description="Continue after an end-of-sequence token.")] = False
    min_tokens: Annotated[
        U32 | None, Meta(description="Ignore end tokens, stop tokens and stop strings before this many tokens.")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, Meta(description="Tokens that end the text and are not included in it.")
    ] = None
    response_format: Annotated[
        Raw,  # decoded when its size is known
        Meta(
            extra_json_schema={"anyOf": [GRAMMAR_SHAPE, {"type": "null"}]},
            description="Format that the text must have: `text`, `json_object`, `json_schema`, `regex`, `choice` or"
            " `lark`, in OpenAI's or TGI's shape.",
        ),
    ] = None  # type: ignore[assignment]
    priority: Annotated[
        int | None,
        Meta(
            description="Priority in the queue, from 0 (first) to 9, as far as the API key allows it. Default: 5.",
            extra_json_schema={"minimum": 0, "maximum": 9},
        ),
    ] = None
    echo: Annotated[Flag, Meta(description="Return the prompt, or the continued message, in front of the text.")] = (
        False
    )

    def __post_init__(self) -> None:
        none_for_null(self, "response_format")


class CompletionRequest(SharedFields, kw_only=True, frozen=True):
    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A text or its token ids, or a list of either."),
    ]
    best_of: Annotated[
        Count, Meta(description="Generate this many choices and return the `n` with the best mean logprob.")
    ] = None
    logprobs: Annotated[
        int | None,
        Meta(description="Return the logprobs of the tokens and of this many most likely tokens (up to 20)."),
    ] = None
    max_tokens: Annotated[
        U32 | None,
        Meta(description="Maximum generated tokens. Default: as many as fit. 0 is allowed only with `echo`."),
    ] = None
    suffix: Annotated[
        str | None,
        Meta(
            description="Text that follows the output (fill in the middle). Needs a model with tokens for it, such as"
            " StarCoder or Qwen2.5-Coder, and text prompts; not with `echo`."
        ),
    ] = None


class ChatRequest(SharedFields, kw_only=True, frozen=True):
    messages: Annotated[list[Message], Meta(description="The conversation, as the model's chat template takes it.")]
    logprobs: Annotated[Flag, Meta(description="Return the logprobs of the tokens.")] = False
    top_logprobs: Annotated[
        int | None,
        Meta(description="With `logprobs`, also return the logprobs of this many most likely tokens (up to 20)."),
    ] = None
    max_tokens: Annotated[Count, Meta(description="The older name of `max_completion_tokens`.")] = None
    max_completion_tokens: Annotated[Count, Meta(description="Maximum generated tokens. Default: as many as fit.")] = (
        None
    )
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
        Flag, Meta(description="Whether one response may call several tools. Default: the model decides.")
    ] = None

    # ---- extensions -----------------------------------------------------------------------------------------------

    tool_prompt: Annotated[
        str | None,
        Meta(
            description="Instructions about the tools, added to the last user message if the chat template does not"
            " support tools."
        ),
    ] = None
    add_generation_prompt: Annotated[
        Flag,
        Meta(description="Let the model start a new message. Default: true, unless the last message is continued."),
    ] = None
    continue_final_message: Annotated[
        Flag, Meta(description="Let the model continue the last message. Default: true if it is an assistant message.")
    ] = None
    reasoning_effort: Annotated[
        str | None,
        Meta(
            description="How much a reasoning model reasons; `none` turns reasoning off if the chat template supports"
            " it. For templates without efforts it sets a token budget: 512 for `minimal`, 2048 for `low`, 8192 for"
            " `medium`.",
            extra_json_schema={"enum": [*EFFORTS, None]},
        ),
    ] = None
    thinking_token_budget: Annotated[
        U32 | None, Meta(description="Maximum reasoning tokens; after that the end of the reasoning is forced.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Variables for the chat template, such as `enable_thinking`.")
    ] = None
    documents: Annotated[
        list[dict[str, Any]] | None, Meta(description="Documents for chat templates that support them.")
    ] = None


class LoadAdapterRequest(Struct, kw_only=True):
    """vLLM's, and a revision."""

    lora_name: Annotated[str, Meta(description="Name for requests, as `model` or `adapter_id`.")]
    lora_path: Annotated[
        str, Meta(description="Absolute path of a folder, or id of a Hub repository; must match `--lora-allow`.")
    ]
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of the Hub repository.")] = None
    load_inplace: Annotated[Flag, Meta(description="Not supported: unload the adapter of that name first.")] = None


class UnloadAdapterRequest(Struct, kw_only=True):
    lora_name: str
