"""Tools: functions that a policy may call by name, with a JSON schema of what they take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = Mapping[str, Any]


class ToolError(Exception):
    """A call that did not work, in one line that the policy is shown and can mend it by."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a policy may call.

    Attributes:
        name: Letters, digits, "_", "-" and ".", unique among the tools of an episode.
        description: What it does and returns, for the policy.
        parameters: JSON schema of its arguments, of type "object".
        function: Takes them by keyword; returns text, or what JSON can hold. Raises ToolError where the call is at
            fault.
    """

    name: str
    description: str
    parameters: JsonObject
    function: Callable[..., Any]

    @property
    def schema(self) -> dict[str, Any]:
        """It as chat completions list it."""
        described = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**described, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that a policy, or a solution, made.

    Attributes:
        name: Of the tool.
        arguments: By keyword.
    """

    name: str
    arguments: JsonObject


def by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Return tools by their names.

    Raises:
        ValueError: If two share one.
    """
    found = {tool.name: tool for tool in tools}
    if len(found) < len(tools):
        raise ValueError(f"tools share names: {sorted(tool.name for tool in tools)}")
    return found
