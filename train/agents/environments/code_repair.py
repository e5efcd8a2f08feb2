"""An issue and a repository with one fault in it; hidden tests tell whether it is mended and nothing else broken."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence

from train.agents.environment import Call, Grade, Split, Task
from train.agents.environments import repositories
from train.agents.environments.calling import describe
from train.agents.environments.drawing import random_for, split_of
from train.agents.environments.interpreter import Sessions
from train.agents.environments.mutations import Mutation, mutations
from train.agents.environments.repositories import MODULES, PACKAGE
from train.agents.process import SandboxError
from train.agents.session import Session
from train.agents.tools import Tool, ToolError

SYSTEM = (
    "You mend a Python project in the folder you are in. Find the fault, edit the file, and say in a"
    " line what it was."
)
SHOWN = 2  # failing calls in an issue; the others are hidden
VISIBLE = 20  # passing calls that the repository's own tests hold
MOST_FAILING = 0.6  # of the calls: a fault that breaks nearly everything is not worth an issue
LINES = 400  # that `read` shows
SET_UP = "git init -q . && git add . && git -c user.name=dev -c user.email=dev@localhost commit -q -m 'Import'"


class RepairEpisode:
    """An attempt at one issue.

    Args:
        session: With the repository in it.
        task: The issue.

    Attributes:
        tools: `bash`, `read` and `edit`.
    """

    def __init__(self, session: Session, task: Task) -> None:
        """Put the repository in and make its first commit."""
        self._session, self._module = session, task.data["module"]
        self._broken = broken_source(task)
        files = {
            repositories.file_of(self._module): self._broken,
            f"{PACKAGE}/__init__.py": "",
            "README.md": f"# {PACKAGE}\n\nText, numbers and names. Tests: `python test_{PACKAGE}.py`.\n",
            f"test_{PACKAGE}.py": _visible_tests(self._module, task.data["failing"]),
        }
        for path, text in files.items():
            session.put(path, text.encode())
        made = session.bash(SET_UP)
        if made.status != "ok":
            raise SandboxError(
                f"the repository of {task.name} can not be made: {made.text.strip()}"
            )
        self.tools: Sequence[Tool] = [
            describe(self._bash, "Run a command line in the project's folder.", name="bash", command="For bash."),
            describe(
                self._read, f"Show a file's lines with their numbers, {LINES} at a time.", name="read",
                optional=("first",),
                path="Of the file.", first={"type": "integer", "description": "Line to begin with (1)."},
            ),
            describe(
                self._edit, "Change a text that occurs once in a file.", name="edit",
                path="Of the file.", old="The text, to the letter.", new="What replaces it.",
            ),
        ]  # fmt: skip

    def grade(self, answer: str) -> Grade:
        """Run the hidden tests on the file as it is now, in a sandbox that the attempt never saw."""
        del answer
        module = self._module
        try:
            source = self._session.get(repositories.file_of(module)).decode(errors="replace")
        except OSError as error:
            return Grade(score=0.0, note=str(error))
        before = repositories.passing(module, repositories.behaviour(module, self._broken))
        after = repositories.passing(module, repositories.behaviour(module, source))
        everything = frozenset(range(len(repositories.cases_of(module))))
        mended = len(after - before) / len(everything - before)
        parts = {"fail to pass": mended, "pass to pass": float(before <= after)}
        note = (
            ""
            if after == everything
            else f"{len(everything - after)} of {len(everything)} hidden tests fail"
        )
        return Grade(score=float(after == everything), parts=parts, note=note)

    def _bash(self, command: str) -> str:
        output = self._session.bash(command)
        if output.status == "dead":
            raise ToolError(output.text.strip())
        return output.text

    def _read(self, path: str, first: int = 1) -> str:
        lines = self._text(path).splitlines()
        shown = lines[max(0, first - 1) : max(0, first - 1) + LINES]
        return "\n".join(f"{number:5} {line}" for number, line in enumerate(shown, max(1, first)))

    def _edit(self, path: str, old: str, new: str) -> str:
        text = self._text(path)
        if not old or text.count(old) != 1:
            raise ToolError(
                f"the text occurs {text.count(old) if old else 0} times in {path}; it must occur once"
            )
        try:
            self._session.put(path, text.replace(old, new).encode(errors="replace"))
        except (OSError, ValueError) as error:
            raise ToolError(str(error)) from error
        return "changed"

    def _text(self, path: str) -> str:
        try:
            return self._session.get(path).decode()
        except (OSError, ValueError) as error:
            raise ToolError(str(error)) from error


class CodeRepair:
    """Issues made by putting faults into modules of Python's library.

    Args:
        sessions: Lends a sandbox; `SessionPool.session`, or `Session` to start one each time.
    """

    name = "code_repair"
    summary = (
        "find and mend a fault in a small repository, by bash, read and edit, against hidden tests"
    )

    def __init__(self, sessions: Sessions = Session) -> None:
        """Start nothing yet."""
        self._sessions = sessions

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Yield issues; drawing one runs the faulty module in a sandbox, to see that some tests fail and most pass."""
        key = seed if split == "train" else 0
        for number in itertools.count():
            rng = random_for("code_repair", split, key, number)
            module = rng.choice(list(MODULES))
            fault = rng.randrange(len(_faults(module)))
            if split_of(f"{module} {_faults(module)[fault]}") != split:
                continue
            name = f"{split}-{key}-{number}"
            task = _issue(name, module, fault)
            if task is not None:
                yield task

    @contextlib.contextmanager
    def open(self, task: Task) -> Iterator[RepairEpisode]:
        """Start a session with the repository in it."""
        with self._sessions() as session:
            yield RepairEpisode(session, task)

    def solve(self, task: Task, call: Call) -> str:
        """Edit back what the fault changed."""
        fault, source = _fault(task), repositories.source_of(task.data["module"])
        # As much of the source around the fault as makes the text occur once.
        broken = broken_source(task)
        for room in itertools.count(0, 20):
            start, end = max(0, fault.start - room), fault.start + len(fault.after) + room
            if broken.count(broken[start:end]) == 1:
                break
        was = source[start : end + len(fault.before) - len(fault.after)]
        call("edit", path=repositories.file_of(task.data["module"]), old=broken[start:end], new=was)
        return f"{fault.after!r} should be {fault.before!r}"


def broken_source(task: Task) -> str:
    """Return the module of an issue with the fault in it."""
    return _fault(task).apply(repositories.source_of(task.data["module"]))


def _fault(task: Task) -> Mutation:
    return _faults(task.data["module"])[task.data["fault"]]


@functools.cache
def _faults(module: str) -> list[Mutation]:
    return mutations(repositories.source_of(module))


def _issue(name: str, module: str, fault: int) -> Task | None:
    """Write an issue, of the calls that fail; None where none do, or too many."""
    source = _faults(module)[fault].apply(repositories.source_of(module))
    found = repositories.behaviour(module, source)
    cases = repositories.cases_of(module)
    failing = sorted(set(range(len(found))) - repositories.passing(module, found))
    if len(found) < len(cases) or not 0 < len(failing) <= MOST_FAILING * len(cases):
        return None
    shown = random_for("code_repair", "issue", name).sample(failing, min(SHOWN, len(failing)))
    told = [
        f"- `{cases[n]}` gives `{found[n]}`, and should give `{repositories.expected_of(module)[n]}`"
        for n in sorted(shown)
    ]
    return Task(
        name=name,
        environment=CodeRepair.name,
        prompt="\n".join([
            f"In `{repositories.file_of(module)}` (imported as `m`) some results are wrong since the last"
            " change:", *told,
            "Other calls may be concerned too. Please mend it without breaking anything else.",
        ]),
        system=SYSTEM,
        data={"module": module, "fault": fault, "failing": failing},
        difficulty=int(len(failing) <= 3),  # the fewer fail, the less there is to go by
    )  # fmt: skip


def _visible_tests(module: str, failing: Sequence[int]) -> str:
    """Return a test file of calls that pass with the fault and without."""
    cases, expected = repositories.cases_of(module), repositories.expected_of(module)
    kept = [n for n in range(len(cases)) if n not in failing][:VISIBLE]
    name = repositories.file_of(module).removesuffix(".py").replace("/", ".")
    rows = "".join(f"    ({cases[n]!r}, {expected[n]!r}),\n" for n in kept)
    return f"""import {name} as m


def said(call):
    try:
        value = eval(call)
        return repr(list(value) if hasattr(value, "__next__") else value)
    except Exception as error:
        return "raises " + type(error).__name__


for call, expected in [
{rows}]:
    assert said(call) == expected, (call, said(call), expected)
print("all as it should be")
"""
