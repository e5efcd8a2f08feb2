"""What a policy is asked, and JSONL files of it."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from dsv32_jax.config import require
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import UsageError
from train.rl.code_tests import read_tests
from train.rl.language import SCRIPTS

Verifier = Literal["exact", "numeric", "math", "reasoning_gym", "code"]
TYPE_NAMES = {dict: "an object", str: "text"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One question and how answers to it are judged.

    Attributes:
        name: Unique within a run.
        domain: Picks the weights of rewards, and of the KL.
        question: What the policy is asked.
        verifier: The rule that judges a final answer; None leaves that to other rewards.
        answer: The reference, where the verifier needs one.
        data: What the verifier needs beside it, see `verifiers`; of programs, `code_tests`.
        rubric: What a judge goes by; "" where it has nothing to go by.
        language: That answers should be in, as `language.SCRIPTS` names them; None takes the question's.
    """

    name: str
    domain: str
    question: str
    verifier: Verifier | None = None
    answer: str = ""
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rubric: str = ""
    language: str | None = None


def read_tasks(path: Location) -> list[Task]:
    """Read tasks off a JSONL file.

    Args:
        path: The file; blank lines are skipped.

    Returns:
        The tasks; one without a name has the file's and its line's, one without a domain the file's.

    Raises:
        UsageError: If the file can not be read, or a line is no task: names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can not be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            defaults = {"name": f"{path.stem}:{number}", "domain": path.stem}
            try:
                found.append(_task(defaults, json.loads(line)))
            except ValueError as error:
                raise UsageError(f"{path}, line {number}: {error}") from error
    return found


def _task(defaults: Mapping[str, str], line: Any) -> Task:
    """Make a task of a line, checking what its verifier can do with it."""
    require(isinstance(line, dict), "must be a JSON object")
    known = {field.name for field in dataclasses.fields(Task)}
    for key, value in line.items():
        require(
            key in known, f"has an unknown field {key!r}; a task has {', '.join(sorted(known))}"
        )
        kind = dict if key == "data" else str
        require(isinstance(value, kind), f"{key}={value!r} must be {TYPE_NAMES[kind]}")
    require(bool(line.get("question")), "has no question")
    verifier, allowed = line.get("verifier"), get_args(Verifier)
    require(verifier in (None, *allowed), f"verifier={verifier!r} must be one of {allowed}")
    spoken = line.get("language")
    require(spoken in (None, *SCRIPTS), f"language={spoken!r} must be one of {tuple(SCRIPTS)}")
    task = Task(**{**defaults, **line})
    if verifier is None:
        require(bool(task.rubric), "has neither a verifier nor a rubric, so nothing judges answers")
    elif verifier == "reasoning_gym":
        need = {"family", "entry"}
        require(need <= set(task.data), "verifier='reasoning_gym' needs data.family and data.entry")
        pairs = tuple(dict(task.data.get("settings", {})).items())
        return dataclasses.replace(task, data={**task.data, "settings": pairs})
    elif verifier == "code":
        read_tests(task.data)
    else:
        require(bool(task.answer.strip()), f"verifier={verifier!r} needs an answer to compare with")
    return task
