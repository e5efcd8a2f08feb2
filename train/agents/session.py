"""A stateful session in a sandbox: Python in a Jupyter kernel, bash, and files that go in and out."""

import base64
import binascii
import importlib.util
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv32_jax.errors import UsageError
from train.agents import driver, isolation
from train.agents.isolation import Limits
from train.agents.process import Process, SandboxError, is_ready

CALL_S = 120.0  # DeepSeek-V3.2 report, appendix B: the time limit of its Jupyter tool
SLACK_S = (
    driver.INTERRUPT_S + driver.START_S + 15.0
)  # beyond a call's own limit, for the driver to say so
CHUNK = 2**20
MESSAGE_BYTES = 65_536  # of a reply, beside what it carries
PER_CHARACTER = 12  # bytes of one in JSON, at most: two escapes of six

Status = Literal["ok", "error", "timeout", "lost", "dead"]
STATUSES: tuple[Status, ...] = ("ok", "error", "timeout", "lost")


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a call came to.

    Attributes:
        status: "ok"; "error", of the code's own; "timeout", and the session goes on; "lost", it goes on without its
            variables; "dead", the sandbox was killed with all its files.
        text: What was written, the middle left out where it is long, and a last line that says what happened.
        seconds: That it took.
    """

    status: Status
    text: str
    seconds: float


class Session:
    """A sandbox that calls share, one after the other; a context manager.

    Args:
        limits: Of the sandbox.
        unsafe_local: Run it without isolation.

    Attributes:
        limits: The same.

    Raises:
        UsageError: If jupyter_client or ipykernel is not installed.
        SandboxError: If it does not start.
    """

    def __init__(self, limits: Limits = Limits(), *, unsafe_local: bool = False) -> None:  # noqa: B008 - frozen
        """Start it, kernel and all; the class docstring has the arguments."""
        for library in ("jupyter_client", "ipykernel"):
            if importlib.util.find_spec(library) is None:
                raise UsageError(f"a session needs {library}: pip install 'dsv32-jax[agents]'")
        self.limits = limits
        self._closed = False
        self._buffer = bytearray()
        source = Path(driver.__file__).read_text(encoding="utf-8")
        kind = "local" if unsafe_local else "isolated"
        argv = [sys.executable, "-I", "-c", source, kind]
        self._process = Process(argv, limits, unsafe_local=unsafe_local)
        assert self._process.stdin is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        try:
            self._receive(time.monotonic() + driver.START_S + SLACK_S, MESSAGE_BYTES)
        except _DeadError as error:
            why = self._complaint()
            self.close()
            raise SandboxError(f"a session does not start: {why or error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Session":
        """Return the session."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.close()

    def close(self) -> None:
        """Kill every process of it; its files are gone."""
        self._closed = True
        self._process.close()

    @property
    def is_alive(self) -> bool:
        """Whether calls can still be made."""
        return not self._closed and self._process.is_alive()

    def python(self, code: str, *, timeout_s: float = CALL_S) -> Output:
        """Run a cell in the session's kernel.

        Args:
            code: As a cell of a notebook.
            timeout_s: After which it is interrupted, and the kernel killed if it does not heed that.

        Returns:
            What it wrote and showed, tracebacks included.
        """
        return self._run("python", code, timeout_s)

    def bash(self, command: str, *, timeout_s: float = CALL_S) -> Output:
        """Run a command line in a new shell; files stay, variables and the folder do not.

        Args:
            command: For `bash -c`.
            timeout_s: After which it is killed with everything in the sandbox but the kernel.

        Returns:
            What it wrote, to either stream.
        """
        return self._run("bash", command, timeout_s)

    def put(self, path: str, data: bytes) -> None:
        """Write a file into the sandbox, from within: links lead nowhere else.

        Args:
            path: In the working folder.
            data: Its bytes.

        Raises:
            ValueError: If the path leads out.
            OSError: If it can not be written, or the sandbox is dead.
        """
        text = base64.b64encode(data).decode()
        self._file({"kind": "put", "path": isolation.checked_path(path), "data": text}, 0)

    def get(self, path: str, *, max_bytes: int = 2**24) -> bytes:
        """Read a file of the sandbox, from within.

        Args:
            path: In the working folder.
            max_bytes: That it may have.

        Returns:
            Its bytes.

        Raises:
            ValueError: If the path leads out.
            OSError: If it can not be read, is larger, or the sandbox is dead.
        """
        request = {"kind": "get", "path": isolation.checked_path(path), "max_bytes": max_bytes}
        note = self._file(request, 4 * max_bytes // 3)
        try:
            data = base64.b64decode(note, validate=True)
        except binascii.Error as error:
            raise OSError(f"{path}: the sandbox answered with what is no base64") from error
        if len(data) > max_bytes:
            raise OSError(f"{path}: the sandbox answered with more than {max_bytes} bytes")
        return data

    def _run(self, kind: str, text: str, timeout_s: float) -> Output:
        started = time.monotonic()
        request = {"kind": kind, "text": text, "timeout_s": timeout_s}
        room = PER_CHARACTER * self.limits.output_bytes
        try:
            reply = self._call(request, timeout_s + SLACK_S, room)
            status, note = reply["status"], reply["note"]
        except _DeadError as error:
            reply, status, note = {"text": ""}, "dead", str(error)
        body = reply["text"]
        if note:
            body += ("" if not body or body.endswith("\n") else "\n") + f"[{note}]\n"
        return Output(status=status, text=body, seconds=time.monotonic() - started)

    def _file(self, request: dict[str, Any], room: int) -> str:
        try:
            reply = self._call(request, SLACK_S, room)
        except _DeadError as error:
            raise OSError(f"{request['path']}: {error}") from error
        if reply["status"] != "ok":
            raise OSError(f"{request['path']}: {reply['note']}")
        return reply["note"]

    def _call(self, request: dict[str, Any], wait_s: float, room: int) -> dict[str, Any]:
        """Send a request and return its reply, of the right form; what it says is the sandbox's word."""
        if self._closed:
            raise _DeadError("the session is closed")
        deadline = time.monotonic() + wait_s
        line = json.dumps(request | {"keep": self.limits.output_bytes}).encode() + b"\n"
        try:
            self._send(line, deadline)
            return _checked(self._receive(deadline, MESSAGE_BYTES + room))
        except _DeadError as error:
            self._process.kill()
            if self._process.out_of_memory:
                mib = self.limits.memory_mib
                raise _DeadError(f"it took more than {mib} MiB and was killed") from error
            raise

    def _send(self, line: bytes, deadline: float) -> None:
        view = memoryview(line)
        while view:
            if not is_ready(self._in, deadline, writing=True):
                raise _DeadError("the sandbox does not answer; it was killed")
            try:
                view = view[os.write(self._in, view) :]
            except BrokenPipeError as error:
                raise _DeadError("the sandbox is dead") from error

    def _receive(self, deadline: float, max_bytes: int) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if not is_ready(self._out, deadline):
                raise _DeadError("the sandbox does not answer; it was killed")
            data = os.read(self._out, CHUNK)
            if not data:
                raise _DeadError("the sandbox died")
            self._buffer += data
            if len(self._buffer) > max_bytes:
                raise _DeadError("the sandbox answers out of form; it was killed")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _complaint(self) -> str:
        """Return the last line that the driver or bubblewrap wrote of a failure."""
        self._process.kill()
        said = (self._process.stderr.read() or b"").decode(errors="replace").strip()
        return said.rpartition("\n")[2]


class _DeadError(Exception):
    """The sandbox can not be talked to any more: says why."""


def _checked(line: bytes) -> dict[str, Any]:
    """Return a reply if it has the form of one."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    good = isinstance(reply, dict) and reply.get("status") in STATUSES
    if not good or not all(isinstance(reply.get(key), str) for key in ("text", "note")):
        raise _DeadError("the sandbox answers out of form; it was killed")
    # Half a surrogate pair would fail wherever the text is written.
    return {key: reply[key].encode(errors="replace").decode() for key in ("status", "text", "note")}
