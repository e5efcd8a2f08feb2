"""Tools of Python functions, and the calling of tools: arguments checked, faults told apart, long results cut."""

import inspect
import json
import re
import textwrap
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from dsv32_jax.errors import UsageError
from train.agents.tools import JsonObject, Tool, ToolError

MAX_CHARS = 16_384  # of a result, unless told otherwise
LONGEST_COMPLAINT = 300  # of a value that is quoted back to the policy
ARGUMENT = re.compile(r"^(\w+)(?: \([^)]*\))?: *(.*)$")  # of a docstring's Args section

Outcome = Literal["ok", "error", "defect"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a call came to.

    Attributes:
        outcome: "ok"; "error", which the policy made and can mend; "defect", an exception of the tool's own.
        text: What the policy is shown.
        seconds: That the call took.
    """

    outcome: Outcome
    text: str
    seconds: float = 0.0


def tool_of(function: Callable[..., Any], *, name: str = "") -> Tool:
    """Make a tool of a function.

    Name, description and schema come from its name, its docstring (in Google's style: all before `Args:`, and a line
    for each argument) and its annotations. Arguments arrive as the annotated types.

    Args:
        function: Every parameter is annotated and can be given by keyword: str, int, float, bool, None, Literal,
            Optional and other unions, list, tuple, dict, and whatever else pydantic has a JSON schema for.
        name: In place of its own.

    Returns:
        The tool.

    Raises:
        ValueError: If it has no docstring, or a parameter that a schema can not describe; names both.
        UsageError: If pydantic is not installed.
    """
    pydantic = _pydantic()
    label = name or function.__name__
    summary, described = _docstring(inspect.getdoc(function) or "")
    if not summary:
        raise ValueError(f"tool {label}: the function needs a docstring, which the policy is shown")
    hints = typing.get_type_hints(function)
    adapters: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"tool {label}: parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{where} can not be given by keyword")
        if parameter.name not in hints:
            raise ValueError(f"{where} has no annotation")
        try:
            adapter = pydantic.TypeAdapter(hints[parameter.name])
            schema = adapter.json_schema()
        except pydantic.errors.PydanticUserError as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"{where} has no JSON schema: {first}") from error
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            schema["default"] = adapter.dump_python(parameter.default, mode="json")
        adapters[parameter.name], properties[parameter.name] = adapter, schema

    def call(**arguments: Any) -> Any:
        return function(
            **{key: adapters[key].validate_python(value) for key, value in arguments.items()}
        )

    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    parameters["additionalProperties"] = False
    return Tool(name=label, description=summary, parameters=parameters, function=call)


def _pydantic() -> Any:
    try:
        import pydantic
    except ImportError as error:
        raise UsageError(f"tools need `pip install 'dsv32-jax[agents]'` ({error})") from error
    return pydantic


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return what stands before the sections of a docstring, and a description of each argument."""
    summary, _, rest = text.partition("\nArgs:\n")
    summary = re.split(r"\n(?:Returns|Raises|Yields):\n", summary)[0].strip()
    section = re.split(r"\n(?=\S)", rest)[0]
    described: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(section).splitlines():
        if found := ARGUMENT.match(line):
            name = found[1]
            described[name] = found[2]
        elif name and line.strip():
            described[name] += f" {line.strip()}"
    return summary, described


def check(tool: Tool, arguments: JsonObject) -> None:
    """Check arguments against a tool's schema.

    Args:
        tool: The tool.
        arguments: Of a call.

    Raises:
        ToolError: If they do not fit: says which, and what is expected, in one line.
    """
    errors = list(_validator(json.dumps(tool.parameters)).iter_errors(dict(arguments)))
    if errors:
        first = min(errors, key=lambda error: len(error.absolute_path))
        raise ToolError(f"{tool.name}: {_complaint(first)}{_usage(tool)}")


@cache
def _validator(schema: str) -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise UsageError(f"tools need `pip install 'dsv32-jax[agents]'` ({error})") from error
    parsed = json.loads(schema)
    return jsonschema.validators.validator_for(parsed)(parsed)


def _complaint(error: Any) -> str:
    where = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in error.absolute_path)
    message = str(error.message)
    if len(message) > LONGEST_COMPLAINT:
        message = f"{message[:LONGEST_COMPLAINT]}..."
    return f"{where[1:]}: {message}" if where else message


def _usage(tool: Tool) -> str:
    """Return what a tool takes, for a policy that got it wrong."""
    required = tool.parameters.get("required", ())
    names = [
        name if name in required else f"{name} (optional)"
        for name in tool.parameters.get("properties", {})
    ]
    return f"; it takes {', '.join(names)}" if names else "; it takes no arguments"


def call(tool: Tool, arguments: JsonObject, *, max_chars: int = MAX_CHARS) -> Result:
    """Call a tool, whatever comes of it.

    Args:
        tool: The tool.
        arguments: As the policy gave them.
        max_chars: Of the result; the middle of a longer one is left out, with a note.

    Returns:
        The result; never raises for what a policy wrote or for an exception of the function.
    """
    began = time.monotonic()
    outcome: Outcome = "ok"
    try:
        check(tool, arguments)
        text = _as_text(tool.function(**arguments))
    except ToolError as error:
        outcome, text = "error", f"error: {error}"
    except UsageError:  # of who runs this: a library is missing
        raise
    except Exception as error:  # noqa: BLE001 - the tool's own fault, which must not end the run
        outcome, text = "defect", f"error: {tool.name} failed: {type(error).__name__}: {error}"
    return Result(outcome=outcome, text=cut(text, max_chars), seconds=time.monotonic() - began)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def cut(text: str, max_chars: int) -> str:
    """Leave out the middle of a long text.

    Args:
        text: Any.
        max_chars: That are kept; the note comes on top.

    Returns:
        The text, with a note where something is missing.
    """
    lost = len(text) - max_chars
    if lost <= 0:
        return text
    head = (max_chars + 1) // 2
    tail = text[len(text) - max_chars // 2 :]
    return f"{text[:head]}[... {lost} characters left out ...]{tail}"
