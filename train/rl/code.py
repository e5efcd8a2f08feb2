"""Judges programs by hidden tests, each in a sandbox of its own."""

import json
import math
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from dsv32_jax.config import require
from train.agents import runs
from train.agents.isolation import Limits
from train.agents.process import SandboxError
from train.rl import code_runner
from train.rl.code_tests import CallTest, CodeTest, InputTest, PythonTest, read_tests
from train.rl.tasks import Task

FENCE = "```"
WALL = 3.0  # seconds by the clock for one of computing, as others compute too
START_S = 10.0  # of them for what comes before the program
REL_TOL = 1e-9  # of numbers with a point that a call returns
SPARE_BYTES = 65_536  # that a program may write beyond what it should
DISK_MIB = 64
PROCESSES = 64


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """How programs are run.

    Attributes:
        sandboxes: At a time.
        timeout_s: Seconds of computing that one test may take, unless the task says so itself (`data.timeout_s`); three
            times as long by the clock.
        memory_mib: That it may take, unless the task says so itself (`data.memory_mib`).
        unsafe_local: Run programs without isolation, as this user, where none is to be had.
    """

    sandboxes: int = 2
    timeout_s: float = 10.0
    memory_mib: int = 1024
    unsafe_local: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.sandboxes >= 1, f"sandboxes={self.sandboxes} must be at least 1")
        require(self.timeout_s > 0, f"timeout_s={self.timeout_s} must be positive")
        require(self.memory_mib >= 64, f"memory_mib={self.memory_mib} must be at least 64")


def extract(answer: str) -> str:
    """Return the program in an answer: its last closed block between fences, or all of it if there is none."""
    found = answer
    block: list[str] | None = None
    for line in answer.splitlines(keepends=True):
        if block is None:
            block = [] if line.startswith(FENCE) else None
        elif line.rstrip() == FENCE:
            found, block = "".join(block), None
        else:
            block.append(line)
    return found


class CodeJudge:
    """Runs hidden tests; threads may share it.

    Args:
        cfg: How.
        should_stop: Asked between tests.
    """

    def __init__(self, cfg: CodeConfig, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Read the runner; the class docstring has the arguments."""
        self._cfg = cfg
        self._should_stop = should_stop
        self._runner = Path(code_runner.__file__).read_text(encoding="utf-8")
        self._free = BoundedSemaphore(cfg.sandboxes)

    def judge(self, answer: str, task: Task) -> float:
        """Run a task's tests against an answer.

        Args:
            answer: As `answer.read` found it.
            task: With `verifier="code"`.

        Returns:
            1 if all pass, else 0; where `data.partial` is true, the share that pass.

        Raises:
            SandboxError: If a sandbox failed, or the run is to stop: nothing is known of the answer.
            ValueError: If the task's tests can not be read.
        """
        tests = read_tests(task.data)
        program = extract(answer).encode(errors="replace")
        passed = 0
        for test in tests:
            if self._passes(program, test, task):
                passed += 1
            elif not task.data.get("partial", False):
                return 0.0
        return passed / len(tests)

    def _passes(self, program: bytes, test: CodeTest, task: Task) -> bool:
        timeout_s = float(task.data.get("timeout_s", self._cfg.timeout_s))
        token = secrets.token_hex(16)
        shown, stdin, expected = _sides(test, token)
        limits = Limits(
            memory_mib=math.ceil(task.data.get("memory_mib", self._cfg.memory_mib)),
            disk_mib=DISK_MIB,
            processes=PROCESSES,
            cpu_s=timeout_s,
            output_bytes=len(expected) + SPARE_BYTES,
        )
        with self._free:
            if self._should_stop():
                raise SandboxError("stopped before a test")
            ran = runs.run(
                [sys.executable, "-I", "-c", self._runner],
                stdin=stdin,
                files={code_runner.PROGRAM: program, code_runner.TEST: json.dumps(shown).encode()},
                limits=limits,
                timeout_s=WALL * timeout_s + START_S,
                unsafe_local=self._cfg.unsafe_local,
            )
        if not ran.stderr.startswith(code_runner.STARTED):
            said = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxError(f"the program was not started ({ran.ended}): {said}")
        if ran.ended != "exited" or ran.exit_code != 0:
            return False
        match test:
            case InputTest():
                return _lines(ran.stdout) == _lines(expected)
            case CallTest():
                return _is_same(_value(ran.stdout), test.result)
            case PythonTest():
                return ran.stdout == expected


def _sides(test: CodeTest, token: str) -> tuple[dict[str, Any], bytes, bytes]:
    """Return what the sandbox is told of a test, what the program reads, and about what should come back."""
    match test:
        case InputTest():
            return {"kind": "stdin"}, test.stdin.encode(), test.stdout.encode()
        case CallTest():
            asked = {"call": test.call, "args": test.args, "kwargs": test.kwargs}
            return {"kind": "call", **asked}, b"", json.dumps(test.result).encode()
        case PythonTest():
            return {"kind": "code", "code": test.code, "token": token}, b"", token.encode()


def _lines(text: bytes) -> list[str]:
    return (
        "\n".join(line.rstrip() for line in text.decode(errors="replace").split("\n"))
        .rstrip()
        .split("\n")
    )


def _value(text: bytes) -> Any:
    """Return what a call returned; an object that equals nothing where it can not be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return object()


def _is_same(found: Any, expected: Any) -> bool:
    """Compare values of JSON; numbers with a point to rounding, true and false not as numbers."""
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(_is_same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(
            _is_same(found[k], expected[k]) for k in expected
        )
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    if isinstance(expected, int | float) and isinstance(found, int | float):
        if isinstance(expected, int) and isinstance(found, int):
            return found == expected
        return _is_close(found, expected)
    return type(found) is type(expected) and bool(found == expected)


def _is_close(found: int | float, expected: int | float) -> bool:
    try:
        return math.isclose(found, expected, rel_tol=REL_TOL) or (
            found != found and expected != expected
        )
    except OverflowError:  # an integer beyond floats
        return False
