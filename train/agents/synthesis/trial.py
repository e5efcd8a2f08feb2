"""How often a policy solves a task: what it always or never solves teaches it nothing."""

import json
from collections.abc import Callable
from typing import Any

from dsv32_jax.errors import WorkFailedError
from train.agents.environment import Environment, Task
from train.agents.environments.calling import call_tool
from train.agents.tools import ToolCall, ToolError, by_name

MAX_TURNS = 40
MAX_TOKENS = 4_096

Attempt = Callable[[Environment, Task, int], float]  # which attempt it is -> its score


class EndpointPolicy:
    """A policy behind an OpenAI-compatible endpoint; a checkpoint is one once `python -m dsv32_jax.serve CKPT` runs.

    Args:
        base_url: Of the endpoint.
        model: As the endpoint calls it.
        key: Its key.
    """

    def __init__(self, base_url: str, model: str, key: str = "none") -> None:
        """Connect to nothing yet."""
        import openai

        self._client = openai.OpenAI(base_url=base_url, api_key=key)
        self._model = model

    def attempt(self, environment: Environment, task: Task, seed: int) -> float:
        """Play a task once.

        Args:
            environment: The task's.
            task: The task.
            seed: Of the draw.

        Returns:
            The grade's score; 0 where it takes too many turns.

        Raises:
            WorkFailedError: If the endpoint fails.
        """
        import openai

        with environment.open(task) as episode:
            named = by_name(episode.tools)
            messages: list[Any] = (
                [{"role": "system", "content": task.system}] if task.system else []
            )
            messages.append({"role": "user", "content": task.prompt})
            for _ in range(MAX_TURNS):
                try:
                    reply = self._client.chat.completions.create(
                        model=self._model,
                        messages=messages,
                        tools=[tool.schema for tool in episode.tools],  # type: ignore[misc]
                        temperature=1.0,
                        max_tokens=MAX_TOKENS,
                        seed=seed,
                    )
                except openai.OpenAIError as error:
                    raise WorkFailedError(f"the policy's endpoint fails: {error}") from error
                message = reply.choices[0].message
                if not message.tool_calls:
                    return episode.grade(message.content or "").score
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    content = _result(named, getattr(call, "function", None))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            return episode.grade("").score


def _result(named: Any, function: Any) -> str:
    try:
        if function is None:
            raise ToolError("only functions can be called")
        arguments = json.loads(function.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ToolError("arguments are a JSON object")
        result = call_tool(named, ToolCall(name=function.name, arguments=arguments))
        return result if isinstance(result, str) else json.dumps(result)
    except (ToolError, ValueError) as error:
        return f"error: {error}"


def rate(attempt: Attempt, environment: Environment, task: Task, samples: int) -> int:
    """Count how many of some attempts solve a task.

    Args:
        attempt: Plays it once.
        environment: The task's.
        task: The task.
        samples: Attempts.

    Returns:
        How many got 1.
    """
    return sum(attempt(environment, task, seed) == 1 for seed in range(samples))
