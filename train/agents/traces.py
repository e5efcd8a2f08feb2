"""Solutions as conversations: what an environment's author would do, in the words of a policy."""

import json
from typing import Any

from dsv32_jax.encoding import Message
from train.agents import schemas
from train.agents.environment import Environment, Task
from train.agents.tools import Tool, by_name

LAST_THOUGHT = "That is all that was asked for."


def solution_trace(
    environment: Environment, task: Task, *, thinks: bool
) -> tuple[list[Message], list[Tool]]:
    """Solve a task and write down how.

    Args:
        environment: The task's.
        task: The task.
        thinks: Whether an answer needs reasoning before it, as in the official format in thinking mode.

    Returns:
        The conversation from the system message to the answer, each call a turn of its own, and the tools.

    Raises:
        NotImplementedError: If the environment does not know the solution.
        ValueError: If the verifier does not give it 1.
    """
    system = [{"role": "system", "content": task.system}] if task.system else []
    messages: list[Message] = [*system, {"role": "user", "content": task.prompt}]
    with environment.open(task) as episode:
        tools = by_name(episode.tools)

        def call(name: str, **arguments: Any) -> Any:
            returned: list[Any] = []

            def watched(**given: Any) -> Any:
                returned.append(tools[name].function(**given))
                return returned[0]

            tool = Tool(
                name=name,
                description=tools[name].description,
                parameters=tools[name].parameters,
                function=watched,
            )
            result = schemas.call(tool, arguments)
            if result.outcome != "ok":
                raise ValueError(f"{task.name}: the solution's call of {name}: {result.text}")
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            messages.append(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": function}],
                }
            )
            messages.append({"role": "tool", "content": result.text})
            return returned[0]

        answer = environment.solve(task, call)
        grade = episode.grade(answer)
    if grade.score != 1:
        raise ValueError(f"{task.name}: the solution gets {grade.score:g}: {grade.note}")
    thought = {"reasoning_content": LAST_THOUGHT} if thinks else {}
    messages.append({"role": "assistant", "content": answer, **thought})
    return messages, list(tools.values())
