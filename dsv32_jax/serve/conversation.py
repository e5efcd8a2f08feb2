"""A chat body's messages, tools and response format, as the encoder takes them."""

import json
from collections.abc import Sequence
from typing import Any

from dsv32_jax.encoding.messages import ROLES, Message
from dsv32_jax.serve import errors
from dsv32_jax.serve.fields import Fields

# What answers carry and clients send back: null or empty is fine, as nothing is lost.
ECHOED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}
ANY_OBJECT = {"type": "object"}  # the schema of response_format's json_object


def read(fields: Fields) -> tuple[Message, ...]:
    """Read the fields that make the prompt.

    Args:
        fields: The body.

    Returns:
        Messages for `encode_to_tokens`; tools and response format belong to the first system message, an empty one if
        there is none.

    Raises:
        ApiError: A field is wrong, or asks for what there is not.
    """
    raw = fields.array("messages")
    if not raw:
        raise fields.wrong("messages", "must have at least one message")
    messages = [_read_message(one, f"messages[{i}]") for i, one in enumerate(raw)]
    _order_results(messages)
    if messages[-1]["role"] not in ("user", "developer", "tool"):
        raise fields.wrong("messages", "must end in a user, developer or tool message")
    extra = {"tools": _read_tools(fields), "response_format": _read_response_format(fields)}
    extra = {key: value for key, value in extra.items() if value}
    if extra:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0] |= extra
    return tuple(messages)


def _read_message(raw: Any, path: str) -> dict[str, Any]:
    fields = Fields(raw, path)
    role = fields.text("role")
    if role not in ROLES:
        raise fields.wrong("role", f"must be one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": role}
    if role == "assistant":
        message["content"] = _read_content(fields) if fields.has("content") else None
        message["reasoning_content"] = fields.text("reasoning_content", "")
        message["tool_calls"] = [
            _read_call(call, f"{path}.tool_calls[{i}]")
            for i, call in enumerate(fields.array("tool_calls", []))
        ]
    else:
        message["content"] = _read_content(fields)
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id", "")
    fields.end(ECHOED)
    return message


def _read_content(fields: Fields) -> str:
    """Read a text, or an array of texts, which are put together."""
    content = fields.any("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong("content", "must be a text or an array of text parts")
    texts = []
    for i, raw in enumerate(content):
        part = Fields(raw, f"{fields.name('content')}[{i}]")
        if (kind := part.text("type")) != "text":
            raise errors.unsupported(part.name("type"), f"{kind!r} is not supported, only 'text'")
        texts.append(part.text("text"))
        part.end()
    return "".join(texts)


def _read_call(raw: Any, path: str) -> dict[str, Any]:
    fields = Fields(raw, path)
    _check_function_type(fields)
    function = Fields(fields.any("function"), fields.name("function"))
    call = {
        "id": fields.text("id", ""),
        "function": {"name": function.text("name"), "arguments": function.text("arguments")},
    }
    function.end()
    fields.any("index")  # of a stream's delta
    fields.end()
    return call


def _check_function_type(fields: Fields) -> None:
    if (kind := fields.text("type", "function")) != "function":
        raise errors.unsupported(fields.name("type"), f"{kind!r} is not supported, only 'function'")


def _order_results(messages: list[dict[str, Any]]) -> None:
    """Put tool results in the order of their calls, which is how the model tells them apart."""
    for i, message in enumerate(messages):
        if not (calls := message.get("tool_calls")):
            continue
        end = i + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = messages[i + 1 : end]
        where = f"messages[{i}].tool_calls"
        if len(results) != len(calls):
            raise errors.invalid(
                where, f"{where} has {len(calls)} calls and {len(results)} results"
            )
        ids = [call["id"] for call in calls]
        given = [result["tool_call_id"] for result in results]
        if not any(ids) or not any(given):
            continue
        if sorted(given) != sorted(ids) or len(set(ids)) < len(ids):
            raise errors.invalid(where, f"{where} has the ids {ids}, its results have {given}")
        messages[i + 1 : end] = [results[given.index(name)] for name in ids]


def _read_tools(fields: Fields) -> Sequence[Any]:
    """Return the tools that the model is told about."""
    raw = fields.array("tools", [])
    choice = fields.any("tool_choice", "auto")
    if choice not in ("auto", "none"):
        shown = json.dumps(choice)
        raise errors.unsupported("tool_choice", f'{shown} is not supported, only "auto" and "none"')
    tools = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(raw)]
    return [] if choice == "none" else tools


def _read_tool(raw: Any, path: str) -> dict[str, Any]:
    fields = Fields(raw, path)
    _check_function_type(fields)
    whole = fields.any("function")
    function = Fields(whole, fields.name("function"))
    function.text("name")
    function.text("description", "")
    Fields(function.any("parameters", {}), function.name("parameters"))
    _check_not_strict(function)
    function.end()
    fields.end()
    return {"type": "function", "function": whole}


def _check_not_strict(fields: Fields) -> None:
    if fields.boolean("strict", False):
        why = "=true is not supported: the model is told the schema, but nothing holds it to it"
        raise errors.unsupported(fields.name("strict"), why)


def _read_response_format(fields: Fields) -> Any:
    """Return the schema that the model is told, or None."""
    if not fields.has("response_format"):
        return None
    form = Fields(fields.any("response_format"), "response_format")
    kind, schema = form.text("type"), None
    if kind == "json_object":
        schema = ANY_OBJECT
    elif kind == "json_schema":
        inner = Fields(form.any("json_schema"), "response_format.json_schema")
        inner.text("name", "")
        inner.text("description", "")
        schema = inner.any("schema", ANY_OBJECT)
        Fields(schema, inner.name("schema"))
        _check_not_strict(inner)
        inner.end()
    elif kind != "text":
        raise form.wrong("type", "must be text, json_object or json_schema")
    form.end()
    return schema
