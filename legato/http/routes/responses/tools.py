"""Tools of the Responses API as functions, and which of them were something else.

function    as it is, one level up
custom      takes any text: a function with one string, `input`; the model is told the grammar that the text follows
namespace   several functions under a name: each of them, with the name before its own
others      run on OpenAI's servers: ignored
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from legato.api.errors import InvalidRequest
from legato.grammar.kinds import Grammar, GrammarKind

INPUT: Final = "input"
# Between the name of a namespace and that of a function. Models write names of letters, digits and underscores best.
_BETWEEN: Final = "__"


@dataclass(frozen=True, slots=True)
class ResponseTools:
    # As chat completions take them.
    functions: list[dict[str, Any]] = field(default_factory=list)
    # Names of those that take any text.
    custom: set[str] = field(default_factory=set)
    # ... and what that text must look like, where that is said.
    grammars: dict[str, Grammar] = field(default_factory=dict)
    # Name of a function -> its namespace and its name there.
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)

    @staticmethod
    def of(tools: list[dict[str, Any]] | None) -> ResponseTools:
        found = ResponseTools()
        for number, tool in enumerate(tools or []):
            found._add(tool, f"tools[{number}]")
        return found

    def _add(self, tool: dict[str, Any], place: str) -> None:
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise InvalidRequest(f"`{place}.type` must be a string", f"{place}.type")
        if kind == "function":
            self.functions.append({"type": "function", "function": _function(tool, place)})
        elif kind == "custom":
            name = _name(tool, place)
            self.custom.add(name)
            grammar = _grammar(tool, place)
            if grammar is not None:
                self.grammars[name] = grammar
            self.functions.append({"type": "function", "function": _custom(tool, name, place, grammar)})
        elif kind == "namespace":
            self._add_space(tool, place)

    def _add_space(self, tool: dict[str, Any], place: str) -> None:
        space, inner = _name(tool, place), tool.get("tools")
        for number, each in enumerate(inner if isinstance(inner, list) else []):
            at = f"{place}.tools[{number}]"
            if not isinstance(each, dict) or each.get("type") != "function":
                continue
            function = _function(each, at)
            name = f"{space}{_BETWEEN}{function['name']}"
            self.spaces[name] = space, function["name"]
            self.functions.append({"type": "function", "function": {**function, "name": name}})

    def name_of(self, name: str, space: object) -> str:
        """What a call of the conversation is called towards the model."""
        return f"{space}{_BETWEEN}{name}" if isinstance(space, str) and space else name


def _function(tool: dict[str, Any], place: str) -> dict[str, Any]:
    described = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
    return {"name": _name(tool, place), **described}


def _grammar(tool: dict[str, Any], place: str) -> Grammar | None:
    format = tool.get("format")
    if not isinstance(format, dict) or format.get("type") != "grammar":
        return None
    syntax, definition = format.get("syntax"), format.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise InvalidRequest(f"`{place}.format` must have a syntax (lark or regex) and a definition", f"{place}.format")
    return Grammar(GrammarKind(syntax), definition)


def _custom(tool: dict[str, Any], name: str, place: str, grammar: Grammar | None) -> dict[str, Any]:
    description = tool.get("description") or ""
    if not isinstance(description, str):
        raise InvalidRequest(f"`{place}.description` must be a string", f"{place}.description")
    if grammar is not None:
        description += f"\nThe input follows this {grammar.kind.value} grammar:\n{grammar.value}"
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"name": name, "description": description.strip(), "parameters": parameters}


def _name(tool: dict[str, Any], place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"`{place}.name` must be a non-empty string", f"{place}.name")
    return name


def forced_text(choice: str | dict[str, Any] | None, tools: ResponseTools) -> str | None:
    """The tool that must be called with a text that follows a grammar: then the text is all that is generated."""
    if choice == "required" and len(tools.functions) == 1:
        name = tools.functions[0]["function"]["name"]
    else:
        name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "custom" else None
    return str(name) if name in tools.grammars else None


def tool_choice(choice: str | dict[str, Any] | None, tools: ResponseTools) -> Any:
    """As chat completions take it. A tool that was ignored cannot be asked for."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        known = [each for each in listed if _is_known(each)] if isinstance(listed, list) else listed
        return {**choice, "tools": known}
    return choice if _is_known(choice) else None


def _is_known(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type") in ("function", "custom")
