"""Tool calls and tool schemas as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dsv32_jax.encoding import markup
from dsv32_jax.encoding.errors import EncodingError


def to_json(value: Any) -> str:
    """Write JSON as the official format has it: on one line, with spaces, non-ASCII kept.

    Args:
        value: nested dicts, lists and scalars.

    Returns:
        the JSON text.

    Raises:
        EncodingError: it holds what JSON has no form for.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EncodingError(f"a {type(value).__name__} has no JSON form: {error}") from error
    return text


def render_schemas(tools: Sequence[Mapping[str, Any]]) -> str:
    """Write the function of each tool as a line of JSON.

    Args:
        tools: OpenAI tool objects, `{"type": "function", "function": {...}}`.

    Returns:
        the lines, joined by newlines.

    Raises:
        EncodingError: a tool has no function.
    """
    lines = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or "function" not in tool:
            raise EncodingError(f'tools[{number}] must be an object with a "function"')
        lines.append(to_json(tool["function"]))
    return "\n".join(lines)


def render_calls(tool_calls: Sequence[Mapping[str, Any]]) -> str:
    """Write a block of calls; names and string values stand as they are, without escapes.

    Args:
        tool_calls: OpenAI calls, `{"function": {"name": ..., "arguments": a JSON string}}`; ids
            are left out.

    Returns:
        the block, without the empty line before it.

    Raises:
        EncodingError: a call has no name, or its arguments are no JSON object in a string.
    """
    calls = [_render_call(call, f"tool_calls[{i}]") for i, call in enumerate(tool_calls)]
    return "\n".join([f"{markup.CALLS}>", *calls, f"{markup.CALLS_END}>"])


def _render_call(call: Mapping[str, Any], where: str) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise EncodingError(f'{where} must be an object with a "function" that has a "name"')
    arguments = _arguments(function.get("arguments"), f"{where} ({function['name']})")
    # A call without arguments keeps the empty line where they would stand.
    parameters = "\n".join(_render_parameter(name, value) for name, value in arguments.items())
    return f'{markup.INVOKE}{markup.NAME}{function["name"]}">\n{parameters}\n{markup.INVOKE_END}>'


def _arguments(text: Any, where: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise EncodingError(f"{where}: arguments must be a JSON string, not {type(text).__name__}")
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"{where}: arguments are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise EncodingError(f"{where}: arguments must be a JSON object, not {text[:40]!r}")
    return arguments


def _render_parameter(name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    mark = markup.TEXT_VALUE if is_text else markup.JSON_VALUE
    text = value if is_text else to_json(value)
    return f"{markup.PARAMETER}{markup.NAME}{name}{mark}{text}{markup.PARAMETER_END}>"
