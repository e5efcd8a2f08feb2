"""Tools called by name: how solutions, people and checks use an open episode."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.agents.environment import Call, Environment, Grade, Task
from train.agents.tools import JsonObject, Tool, ToolCall, ToolError, by_name

JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


def describe(
    function: Callable[..., Any],
    description: str,
    /,
    *,
    name: str = "",
    optional: Sequence[str] = (),
    **parameters: Any,
) -> Tool:
    """Make a tool of a function.

    Args:
        function: What it does.
        description: What it does and returns, for the policy.
        name: Of the tool; the function's own by default.
        optional: Parameters that may be left out.
        **parameters: Name -> what it is, a text; or its JSON schema, an object.

    Returns:
        The tool; it takes no other arguments.
    """
    properties = {
        key: {"type": "string", "description": value} if isinstance(value, str) else dict(value)
        for key, value in parameters.items()
    }
    required = [key for key in properties if key not in optional]
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool(
        name=name or function.__name__,
        description=description,
        parameters={**schema, "additionalProperties": False},
        function=function,
    )


def call_tool(tools: Mapping[str, Tool], call: ToolCall) -> Any:
    """Call a tool as a policy does.

    Args:
        tools: By name.
        call: Which, and its arguments.

    Returns:
        What it returned, as JSON has it.

    Raises:
        ToolError: If there is no such tool, its arguments are not what its schema says, or it refuses.
    """
    tool = tools.get(call.name)
    if tool is None:
        raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(tools)}")
    _check(tool, call.arguments)
    return json.loads(json.dumps(tool.function(**call.arguments)))


def _check(tool: Tool, arguments: JsonObject) -> None:
    properties = tool.parameters.get("properties", {})
    for key, value in arguments.items():
        if key not in properties:
            raise ToolError(f"{tool.name} has no argument {key!r}; it has {', '.join(properties)}")
        wanted = properties[key].get("type")
        good = JSON_TYPES.get(wanted, (object,))
        if not isinstance(value, good) or (isinstance(value, bool) and bool not in good):
            raise ToolError(f"{tool.name}: {key} must be of type {wanted}")
    for key in tool.parameters.get("required", ()):
        if key not in arguments:
            raise ToolError(f"{tool.name} needs the argument {key!r}")


def caller(tools: Sequence[Tool], log: list[tuple[ToolCall, Any]] | None = None) -> Call:
    """Return what calls the tools of an episode: `call(name, **arguments)`.

    Args:
        tools: Of the episode.
        log: Gets each call that was answered, with its result.

    Returns:
        The function; it raises ToolError as `call_tool` does.
    """
    named = by_name(tools)

    def call(name: str, /, **arguments: Any) -> Any:
        made = ToolCall(name=name, arguments=arguments)
        result = call_tool(named, made)
        if log is not None:
            log.append((made, result))
        return result

    return call


def solve_and_grade(environment: Environment, task: Task) -> tuple[str, Grade]:
    """Have an environment solve its own task.

    Args:
        environment: The environment.
        task: One of its tasks.

    Returns:
        The answer and its grade.
    """
    with environment.open(task) as episode:
        answer = environment.solve(task, caller(episode.tools))
        return answer, episode.grade(answer)


def grade_answer(environment: Environment, task: Task, answer: str) -> Grade:
    """Grade an answer that was given without any call.

    Args:
        environment: The environment.
        task: One of its tasks.
        answer: The answer.

    Returns:
        The grade.
    """
    with environment.open(task) as episode:
        return episode.grade(answer)
