"""An author behind an OpenAI-compatible endpoint; `python -m dsv32_jax.serve CKPT` makes one of a checkpoint."""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from dsv32_jax.errors import UsageError, WorkFailedError
from train.agents.synthesis.pipeline import AuthorError, Proposal
from train.agents.synthesis.worlds import Draft, World, read_draft, read_world, to_json

TEMPERATURE = 1.0
MAX_TOKENS = 8_192
TIMEOUT_S = 600.0
JSON_BLOCK = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
SYSTEM = """You make environments in which assistants with tools are trained. Answer with one JSON object between ```
fences.

A world is {"script": SQL for SQLite that creates and fills tables, "tools": [tool, ...]}.
A tool is {"name", "description", "parameters": {argument: JSON schema}, "guards": [{"sql", "error"}], "steps":
[SQL], "result": SQL,
"returns": "value" | "column" | "row" | "rows"}. Arguments are :name in the SQL. A call is refused with the error
of the first guard
whose query gives 0; then the steps change the tables; then the result's query is returned. No dates or times of
now, nothing random.

A task is {"prompt", "solution", "verifier", "kind"}. The solution is Python: one function `def solve(call):` that
returns the answer as
text, only calls tools as call("tool", argument=value) and computes; no imports, no while, no other functions;
math, json and
statistics are there. The verifier is {"answer": text or null, "compare": "exact" | "number" | "set", "changes":
{table: {"added": [row],
"removed": [row]}} or null, "checks": {name: SQL}}. Tables that "changes" does not name must stay as they are; a
check is a query
whose first value is 1 where the attempt is right, on the tables, on before.table, and on :answer.

A task is kept only if its solution passes, twice alike; if no answer that stands in the prompt, and none without a
call, passes; if wrong
answers fail; and if the solution fails whenever one condition, one call or one choice of min and max in it is
broken."""


class EndpointAuthor:
    """Asks a model. What it writes is data and code that only runs in the sandbox.

    Args:
        base_url: Of the endpoint.
        model: As the endpoint calls it.
        api_key_env: Environment variable with the key; "" sends none.

    Raises:
        UsageError: If the package `openai` or the key is missing.
    """

    def __init__(self, base_url: str, model: str, api_key_env: str = "") -> None:
        """Connect to nothing yet."""
        try:
            import openai
        except ImportError as error:
            raise UsageError(
                f"an endpoint needs `pip install 'dsv32-jax[rl]'` ({error})"
            ) from error
        key = os.environ.get(api_key_env, "") if api_key_env else "none"
        if not key:
            raise UsageError(f"the endpoint's key is missing: set the variable {api_key_env}")
        self._client = openai.OpenAI(base_url=base_url, api_key=key, timeout=TIMEOUT_S)
        self._model = model

    def world(self, category: str, name: str, complaint: str) -> World:
        """Ask for a world."""
        text = f"Make a world about: {category}. Five to fifteen rows a table; tools that leave room for hard tasks."
        data = self._ask(text + (f"\nThe last one did not work: {complaint}" if complaint else ""))
        return _world({**data, "name": name, "category": category})

    def propose(self, world: World, earlier: Sequence[Draft], difficulty: int) -> Proposal:
        """Ask for a task."""
        before = "\n".join(draft.prompt for draft in earlier) or "none"
        return self._proposal(
            f"The world:\n{to_json(world)}\nTasks so far:\n{before}\nPropose one more of difficulty"
            f" {difficulty}, harder than"
            f' those: {{"task": task, "tools": [new tools, if the task needs any]}}.',
            world,
            difficulty,
        )

    def repair(self, proposal: Proposal, complaint: str) -> Proposal:
        """Ask for the task again."""
        return self._proposal(
            f"The world:\n{to_json(proposal.world)}\nThe task:\n{to_json(proposal.draft)}\nIt is not kept:"
            f" {complaint}\nMend it:"
            ' {"task": task, "tools": [tools to add or replace]}.',
            proposal.world,
            proposal.draft.difficulty,
        )

    def _proposal(self, text: str, world: World, difficulty: int) -> Proposal:
        data = self._ask(text)
        try:
            draft = read_draft({**data["task"], "difficulty": difficulty})
            more = _world({**dataclasses.asdict(world), "tools": data.get("tools", [])}).tools
        except (KeyError, TypeError, ValueError) as error:
            raise AuthorError(f"no task: {error}") from error
        named = {tool.name: tool for tool in (*world.tools, *more)}
        return Proposal(dataclasses.replace(world, tools=tuple(named.values())), draft)

    def _ask(self, text: str) -> dict[str, Any]:
        import openai

        try:
            reply = self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
                temperature=TEMPERATURE,
                max_tokens=MAX_TOKENS,
            )
        except openai.OpenAIError as error:
            raise WorkFailedError(f"the endpoint fails: {error}") from error
        content = reply.choices[0].message.content or ""
        blocks = JSON_BLOCK.findall(content)
        try:
            data = json.loads(blocks[-1] if blocks else content)
        except (ValueError, RecursionError) as error:
            raise AuthorError(f"the reply holds no JSON: {error}") from error
        if not isinstance(data, dict):
            raise AuthorError("the reply is no JSON object")
        return data


def _world(data: dict[str, Any]) -> World:
    try:
        return read_world(data)
    except ValueError as error:
        raise AuthorError(str(error)) from error
