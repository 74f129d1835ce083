"""The fields of a chat request that are about tools, checked: which there are, and whether one must be called.

OpenAI's shapes, and what TGI's clients send: `arguments` for `parameters`, the name of a tool as `tool_choice`.

    tool_choice   "auto"   "none"   "required"   {"type": "function", "function": {"name": ...}}
                  {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [functions]}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from legato.api.errors import InvalidRequest, RequestError

Schema = dict[str, Any]
_NO_PARAMETERS: Final[Schema] = {"type": "object", "properties": {}}
# Of objects and lists in each other. Everything that reads schemas calls itself for every level.
_MAX_DEPTH: Final = 100
# No model can choose from more, and every one of them costs the event loop some time.
_MAX_TOOLS: Final = 1024


class ToolError(RequestError):
    """Tools that cannot be used like that."""

    status, error_type = 422, "tool_error"

    def __init__(self, problem: str) -> None:
        super().__init__(f"Tool error: {problem}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    # A JSON schema of an object.
    parameters: Schema
    # As chat templates take it: OpenAI's shape, without what concerns the server alone.
    described: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    tools: tuple[Tool, ...]
    # One of these must be called. Empty: it is the model's choice.
    forced: tuple[Tool, ...] = ()
    # Whether it was named. Then it is called once.
    named: bool = False
    # Whether one answer may call several. None: as the model is used to.
    several: bool | None = None
    # What the client wants the model to be told about tools.
    prompt: str | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)


def tool_use_of(
    tools: list[Any] | None, choice: Any, several: bool | None = None, prompt: str | None = None
) -> ToolUse | None:
    """None: the request is a chat without tools, because it has none or wants none to be used."""
    if not tools:
        if choice not in (None, "auto", "none"):
            raise InvalidRequest("`tool_choice` needs `tools` to choose from", "tool_choice")
        return None
    if len(tools) > _MAX_TOOLS:
        raise InvalidRequest(f"`tools` has {len(tools)} tools, and at most {_MAX_TOOLS} are possible", "tools")
    if _is_deep(tools):
        raise InvalidRequest(f"`tools` are nested more than {_MAX_DEPTH} levels deep", "tools")
    known = tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        known, choice = _allowed(known, choice)
    if choice == "none":
        return None
    named = choice not in (None, "auto", "required")
    return ToolUse(known, _forced(known, choice), named, several, prompt)


def _is_deep(tools: list[Any]) -> bool:
    level: list[Any] = [tools]
    for _ in range(_MAX_DEPTH):
        level = [each for thing in level for each in (thing.values() if isinstance(thing, dict) else thing)]
        level = [thing for thing in level if isinstance(thing, dict | list)]
    return bool(level)


def _tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise InvalidRequest(f"`{place}` must be an object with the type `function`", place)
    place += ".function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"`{place}` must be an object", place)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"`{place}.name` must be a non-empty string", f"{place}.name")
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"`{place}.description` must be a string", f"{place}.description")
    parameters = _parameters(function, place)
    described = {key: value for key, value in function.items() if key not in ("arguments", "parameters", "strict")}
    return Tool(name, parameters, {"type": "function", "function": {**described, "parameters": parameters}})


def _parameters(function: dict[str, Any], place: str) -> Schema:
    word = "arguments" if function.get("parameters") is None else "parameters"
    parameters = function.get(word)
    if parameters is None:
        return _NO_PARAMETERS
    place = f"{place}.{word}"
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"`{place}` must be a JSON schema", place)
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"`{place}.type` must be `object`", f"{place}.type")
    return parameters


def _allowed(tools: tuple[Tool, ...], choice: dict[str, Any]) -> tuple[tuple[Tool, ...], str]:
    """Some of the tools, and "auto" or "required". The model is not told of the others."""
    place = "tool_choice"
    if "allowed_tools" in choice:  # the Responses API leaves this level out
        choice, place = choice["allowed_tools"], "tool_choice.allowed_tools"
    mode = choice.get("mode") if isinstance(choice, dict) else None
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"`{place}.mode` must be `auto` or `required`", f"{place}.mode")
    if not isinstance(choice.get("tools"), list) or not choice["tools"]:
        raise InvalidRequest(f"`{place}.tools` must be a list of at least one function", f"{place}.tools")
    return tuple(_named(tools, _name_in(function)) for function in choice["tools"]), mode


def _forced(tools: tuple[Tool, ...], choice: Any) -> tuple[Tool, ...]:
    if choice in (None, "auto"):
        return ()
    if choice == "required":
        return tools
    return (_named(tools, choice if isinstance(choice, str) else _name_in(choice)),)


def _named(tools: tuple[Tool, ...], name: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise ToolError(f"Tool with name {name} not found")


def _name_in(choice: Any) -> str:
    """OpenAI's `{"type": "function", "function": {"name": ...}}`; TGI's leaves the type out, others the function."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            "`tool_choice` must be `auto`, `none`, `required`, or an object that names one or several functions",
            "tool_choice",
        )
    return name
