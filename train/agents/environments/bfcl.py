"""The stateful tool sets and multi-turn tasks of bfcl-eval, as a check on tools that nobody here made.

The package is read from a folder into which it was installed without what it depends on:
`pip install --no-deps --target FOLDER bfcl-eval`. Only the classes of its tools are imported, in this process; they
compute on values in memory and open no file. The turns of a task are asked as numbered steps of one message, and
the state that is
left is compared with the one that the reference calls leave: this is not the leaderboard's own score, which looks
at each turn.
Tasks whose reference changes nothing are left out, as they would be solved by doing
nothing, and those whose reference calls do not fit the tools' own schemas.
"""

import ast
import contextlib
import copy
import datetime
import functools
import importlib
import inspect
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv32_jax.errors import UsageError
from train.agents.environment import Call, Grade, Split, Task
from train.agents.environments.calling import solve_and_grade
from train.agents.tools import Tool, ToolError

MODULES: Mapping[str, str] = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
STATELESS = "MathAPI"
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
DATA = "bfcl_eval/data/BFCL_v4_multi_turn_base.json"
ANSWERS = "bfcl_eval/data/possible_answer/BFCL_v4_multi_turn_base.json"
CODE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
SYSTEM = "Carry the steps out in order with the tools."


class BfclEpisode:
    """An attempt at one task: instances of the package's classes.

    Args:
        instances: By class.
        documents: Descriptions of the tools of each class.
        target: The state to reach.

    Attributes:
        tools: All methods that are described.
    """

    def __init__(
        self, instances: Mapping[str, Any], documents: Mapping[str, Sequence[Any]], target: Any
    ) -> None:
        """Make tools of the methods."""
        self._instances, self._target = instances, target
        self.tools: Sequence[Tool] = [
            Tool(
                name=document["name"],
                description=document["description"],
                parameters=_schema(document["parameters"]),
                function=functools.partial(_invoke, getattr(instances[kind], document["name"])),
            )
            for kind in instances
            for document in documents[kind]
        ]

    def grade(self, answer: str) -> Grade:
        """Compare the state that is left, class by class."""
        del answer
        parts = {
            kind: float(state(self._instances[kind]) == self._target[kind])
            for kind in self._instances
        }
        wrong = [kind for kind, same in parts.items() if not same]
        return Grade(
            score=float(not wrong),
            parts=parts,
            note=f"other state: {', '.join(wrong)}" if wrong else "",
        )


class Bfcl:
    """The package's tasks; all are held out.

    Args:
        folder: That it was installed into.

    Raises:
        UsageError: If it is not there.
    """

    summary = "stateful tool sets and multi-turn tasks of bfcl-eval, all held out; FOLDER is where it was installed"

    def __init__(self, folder: Path) -> None:
        """Look whether it is there."""
        if not (folder / DATA).is_file():
            raise UsageError(
                f"{folder} has no {DATA}: pip install --no-deps --target {folder} bfcl-eval (tried with 2026.3.23)"
            )
        self.name = f"bfcl:{folder}"
        self._folder = folder.resolve()

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Yield the tasks that change a state, in the package's order."""
        del seed
        if split == "train":
            return
        answers = {line["id"]: line["ground_truth"] for line in self._lines(ANSWERS)}
        for line in self._lines(DATA):
            turns = [
                "\n".join(m["content"] for m in turn if m["role"] == "user")
                for turn in line["question"]
            ]
            steps = "\n".join(f"{number}. {turn}" for number, turn in enumerate(turns, 1))
            task = Task(
                name=line["id"],
                environment=self.name,
                prompt=steps,
                system=SYSTEM,
                data={
                    "classes": line["involved_classes"],
                    "config": line["initial_config"],
                    "calls": [call for turn in answers[line["id"]] for call in turn],
                },
                difficulty=len(turns),
            )
            before = {kind: state(instance) for kind, instance in self._instances(task).items()}
            if before != self._target(task) and solve_and_grade(self, task)[1].score == 1:
                yield task

    @contextlib.contextmanager
    def open(self, task: Task) -> Iterator[BfclEpisode]:
        """Make the task's instances."""
        documents = {
            kind: self._lines(f"bfcl_eval/data/multi_turn_func_doc/{MODULES[kind]}.json")
            for kind in task.data["classes"]
        }
        yield BfclEpisode(self._instances(task), documents, self._target(task))

    def solve(self, task: Task, call: Call) -> str:
        """Make the reference's calls, those that the tools refuse too."""
        instances = self._instances(task)
        for text in task.data["calls"]:
            name, arguments = _read_call(text, instances)
            with contextlib.suppress(ToolError):
                call(name, **arguments)
        return "done"

    def _lines(self, path: str) -> list[Any]:
        with open(self._folder / path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def _instances(self, task: Task) -> dict[str, Any]:
        found = {}
        for kind in task.data["classes"]:
            found[kind] = _class(str(self._folder), kind)()
            if kind != STATELESS:
                found[kind]._load_scenario(copy.deepcopy(task.data["config"].get(kind, {})))
        return found

    def _target(self, task: Task) -> dict[str, Any]:
        instances = self._instances(task)
        for text in task.data["calls"]:
            name, arguments = _read_call(text, instances)
            with contextlib.suppress(ToolError):
                _invoke(_method(instances, name), **arguments)
        return {kind: state(instance) for kind, instance in instances.items()}


def _class(folder: str, kind: str) -> Any:
    sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(f"{CODE}.{MODULES[kind]}"), kind)
    except ImportError as error:
        raise UsageError(f"bfcl-eval needs a library that is not installed: {error}") from error
    finally:
        sys.path.remove(folder)


def _method(instances: Mapping[str, Any], name: str) -> Any:
    return next(
        getattr(i, name)
        for i in instances.values()
        if not name.startswith("_") and hasattr(i, name)
    )


def _invoke(method: Any, **arguments: Any) -> Any:
    """Call a method; what it raises is the call's fault, as the package has it too."""
    try:
        result = method(**arguments)
    except Exception as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error
    return json.loads(json.dumps(result, default=str))


def _read_call(text: str, instances: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Read a reference call, such as `cd(folder='document')`."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    names = list(inspect.signature(_method(instances, call.func.id)).parameters)
    arguments = {
        name: ast.literal_eval(value) for name, value in zip(names, call.args, strict=False)
    }
    return call.func.id, arguments | {
        k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg
    }


def _schema(described: Any) -> Any:
    """Return the package's schema as JSON schema has it."""
    if isinstance(described, list):
        return [_schema(item) for item in described]
    if not isinstance(described, dict):
        return described
    found = {key: _schema(value) for key, value in described.items()}
    if isinstance(described.get("type"), str):
        found["type"] = TYPES.get(described["type"], described["type"])
    return found


def state(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Return what an instance holds, for comparing.

    Args:
        value: The instance, or a part of it.
        within: Ids of what holds it: a folder's parent is not followed.

    Returns:
        The same as plain values.
    """
    if isinstance(value, dict):
        return {str(key): state(part, within) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [state(part, within) for part in value]
    if isinstance(value, random.Random | datetime.date | datetime.time):  # the time it is now
        return None
    if not hasattr(value, "__dict__"):
        return value
    if id(value) in within:
        return None
    fields = ((k, v) for k, v in vars(value).items() if k != "parent")
    return {key: state(part, (*within, id(value))) for key, part in fields}
