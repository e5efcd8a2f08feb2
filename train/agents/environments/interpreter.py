"""Problems of mathematics, logic and data that want computing, with a Jupyter session as the tool."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from random import Random

from train.agents.environment import Call, Grade, Split, Task
from train.agents.environments.calling import describe
from train.agents.environments.drawing import draw_tasks, random_for
from train.agents.environments.interpreter_problems import KINDS, Problem
from train.agents.session import Session
from train.agents.tools import Tool, ToolError
from train.rl import answer as answers
from train.rl import verifiers
from train.rl.tasks import Task as Judged

SYSTEM = "You have a Python interpreter with a state. Compute; do not guess."
FORM = "Answer with the number alone."

Sessions = Callable[[], AbstractContextManager[Session]]


class InterpreterEpisode:
    """An attempt at one problem: a session with the problem's files.

    Args:
        session: Open.
        problem: With the reference.

    Attributes:
        tools: `python`, and nothing else.
    """

    def __init__(self, session: Session, problem: Problem) -> None:
        """Put the files in."""
        self._session, self._problem = session, problem
        for name, text in problem.files.items():
            session.put(name, text.encode())
        python = describe(
            self._python,
            "Run Python as a cell of a notebook: variables stay, what is printed or stands last is shown.",
            name="python",
            code="The cell.",
        )
        self.tools: Sequence[Tool] = [python]

    def grade(self, answer: str) -> Grade:
        """Compare the number with the reference."""
        return grade_number(answer, self._problem.answer, self._problem.rel_tol)

    def _python(self, code: str) -> str:
        output = self._session.python(code)
        if output.status == "dead":
            raise ToolError(output.text.strip())
        return output.text


class Interpreter:
    """Problems without end, of twelve kinds.

    Args:
        sessions: Lends a sandbox; `SessionPool.session`, or `Session` to start one each time.
    """

    name = "interpreter"
    summary = (
        "mathematics, logic and data, computed in a sandboxed Python session, checked by number"
    )

    def __init__(self, sessions: Sessions = Session) -> None:
        """Start nothing yet."""
        self._sessions = sessions

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Yield problems, kinds in random order."""
        return draw_tasks(self.name, split, seed, self._make)

    @contextlib.contextmanager
    def open(self, task: Task) -> Iterator[InterpreterEpisode]:
        """Start a session with the problem's files."""
        with self._sessions() as session:
            yield InterpreterEpisode(session, _problem(task.data))

    def solve(self, task: Task, call: Call) -> str:
        """Run the problem's program."""
        return call("python", code=_problem(task.data).program).strip()

    def _make(self, name: str, rng: Random) -> Task:
        data: dict[str, str | int] = {"kind": rng.randrange(len(KINDS)), "key": name}
        problem = _problem(data)
        return Task(
            name=name,
            environment=self.name,
            prompt=f"{problem.question}\n{FORM}",
            system=SYSTEM,
            data=data,
            difficulty=problem.difficulty,
        )


def _problem(data: Mapping[str, str | int]) -> Problem:
    return KINDS[int(data["kind"])](random_for("interpreter", "problem", data["key"]))


def grade_number(answer: str, reference: str, rel_tol: float) -> Grade:
    """Grade an answer that should be a number.

    Args:
        answer: The last message: the number, or a text with it in `<answer>` tags or a box.
        reference: The right number.
        rel_tol: How far off it may be; 0 asks for the very number.

    Returns:
        1 or 0.
    """
    final = answers.read(answer, "chat", cut=False).final
    data = {"rel_tol": rel_tol} if rel_tol else {}
    judged = Judged(
        name="", domain="", question="", verifier="numeric", answer=reference, data=data
    )
    score = verifiers.verify(final, judged)
    note = "" if score == 1 else f"{json.dumps(final)} is not {reference}"
    return Grade(score=score, note=note)
