"""What a request says of tools, checked. Knows no model: how tools are shown and calls are read is `text`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.errors import RequestError
from holdfast.server.schema.requests import ChatBody, NamedTool, ToolDefinition
from holdfast.text.messages import plain
from holdfast.text.tools.events import Tool

MAX_TOOLS = 128
"""OpenAI's own limit."""
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools that a model is shown. Where it may call none it is shown none, and there is no ToolUse."""

    tools: tuple[Tool, ...]
    """Of a named choice: all are shown."""
    choice: Literal["auto", "required", "named"]
    name: str | None = None
    parallel: bool = True

    def in_words(self, parser: str | None) -> bool:
        """Whether tools are described in words to a template that has none: where a call is demanded, or the server was
        told in which form calls come (`parser`). A model that may call or not is left as its template has it."""
        return self.forced or parser is not None

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.name in (None, tool.name))

    @property
    def forced(self) -> bool:
        return self.choice != "auto"


def read_tool_use(body: ChatBody, raw: Sequence[Mapping[str, Any]] | None, *, auto: bool) -> ToolUse | None:
    """`raw`: the tools as they were sent, which is what templates are given. `auto`: whether that choice is allowed."""
    choice = body.tool_choice
    if not body.tools or raw is None:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", needed="tools", field="tool_choice")
        return None
    if len(body.tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(body.tools)} entries; the limit is {MAX_TOOLS}", field="tools")
    if choice == "none":
        return None
    tools = tuple(
        _tool(given, sent, f"tools[{place}]") for place, (given, sent) in enumerate(zip(body.tools, raw, strict=True))
    )
    names = [tool.name for tool in tools]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise RequestError(f"tools: two functions are named {twice}", field="tools")
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise RequestError(
                f"tool_choice names {name[:100]!r}, which is not in tools",
                needed="the name of one of the tools",
                found=", ".join(names)[:200],
                field="tool_choice",
            )
        return ToolUse(tools=tools, choice="named", name=name, parallel=False)
    if choice == "required":
        return ToolUse(tools=tools, choice="required", parallel=parallel)
    if not auto:
        raise RequestError(
            'tool_choice "auto" is disabled on this server (--enable-auto-tool-choice=false)',
            fix='send tool_choice "required", "none" or the name of a tool',
            field="tool_choice",
        )
    return ToolUse(tools=tools, choice="auto", parallel=parallel)


def _tool(given: ToolDefinition, sent: Mapping[str, Any], where: str) -> Tool:
    parameters = given.function.parameters or NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where}.function.parameters is not a JSON schema of type object",
            needed='"type": "object"',
            found=str(parameters.get("type"))[:100],
            field=f"{where}.function.parameters",
        )
    function = {key: value for key, value in sent["function"].items() if key != "strict" and value is not None}
    # A copy that is no deeper than whoever writes or walks it can go.
    shown = plain({"type": "function", "function": {**function, "parameters": parameters}}, "tools")
    return Tool(
        name=given.function.name,
        given=shown,
        parameters={"type": "object", **shown["function"]["parameters"]},
        strict=bool(given.function.strict),
    )
