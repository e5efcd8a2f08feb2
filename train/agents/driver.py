"""The inside of a session: runs in the sandbox, by its source, and shares nothing with the outside but two pipes.

It reads requests as lines of JSON and answers each with one. Code of a model runs as the same user and may do what it
likes with this process: what comes out of it is to be mistrusted, as is all that the code writes.
"""

import base64
import contextlib
import json
import os
import queue
import re
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

START_S = 60.0  # that the kernel may take to start
INTERRUPT_S = 5.0  # that an interrupted kernel may take to answer
POLL_S = 0.2
CHUNK = 65_536
FLOOD = 64  # times the output that is kept, beyond which a call is ended
SWEEPS = 50
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Clip:
    """Keeps the first and the last of what is written."""

    def __init__(self, size: int) -> None:
        """Keep this many characters."""
        self._half = size // 2
        self._head, self._tail, self._written = "", "", 0

    def add(self, text: str) -> None:
        """Add what was written."""
        self._written += len(text)
        room = self._half - len(self._head)
        self._head += text[:room]
        self._tail = (self._tail + text[room:])[-self._half :]

    @property
    def is_flooded(self) -> bool:
        """Whether so much was written that nobody can want it."""
        return self._written > FLOOD * 2 * self._half

    def text(self) -> str:
        """Return what was kept, with a note of what was not."""
        lost = self._written - len(self._head) - len(self._tail)
        note = f"\n[... {lost} characters left out ...]\n" if lost else ""
        return self._head + note + self._tail


class Kernel:
    """An ipykernel, and the way to it: sockets in a folder, no network."""

    def __init__(self) -> None:
        """Start none yet."""
        self._manager: Any = None
        self._client: Any = None

    @property
    def pid(self) -> int | None:
        """The kernel's process."""
        return None if self._manager is None else self._manager.provisioner.pid

    def start(self) -> None:
        """Start one, if none runs."""
        from jupyter_client.manager import KernelManager

        if self._manager is not None and self._manager.is_alive():
            return
        folder = tempfile.mkdtemp(prefix=".kernel")
        self._manager = KernelManager(transport="ipc", ip=f"{folder}/k")
        self._manager.connection_file = f"{folder}/connection.json"
        self._manager.start_kernel(
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            extra_arguments=["--HistoryManager.enabled=False"],
        )
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_S)

    def stop(self) -> None:
        """Kill it."""
        if self._manager is not None:
            self._client.stop_channels()
            self._manager.shutdown_kernel(now=True)
            self._manager = None

    def run(self, code: str, timeout_s: float, clip: Clip) -> tuple[str, str]:
        """Run code; returns a status and a note."""
        self.start()
        message = self._client.execute(code, allow_stdin=False)
        deadline = time.monotonic() + timeout_s
        status, why = self._follow(message, clip, deadline), ""
        if status == "running":
            why = "wrote far too much" if clip.is_flooded else f"ran for {timeout_s:g} s"
            self._manager.interrupt_kernel()
            status = self._follow(message, None, time.monotonic() + INTERRUPT_S)
        if status == "dead":
            self.stop()
            return "lost", "the Python session died; its variables are lost"
        if status == "running":
            self.stop()
            note = f"it {why} and could not be interrupted; the session was restarted, its variables are lost"
            return "lost", note
        return (
            ("timeout", f"it {why} and was interrupted; variables are kept")
            if why
            else (status, "")
        )

    def _follow(self, message: str, clip: Clip | None, deadline: float) -> str:
        """Collect output until the code ends; "running" if it does not."""
        status = "ok"
        while time.monotonic() < deadline and not (clip is not None and clip.is_flooded):
            wait_s = min(POLL_S, max(deadline - time.monotonic(), 0))
            try:
                found = self._client.get_iopub_msg(timeout=wait_s)
            except queue.Empty:
                if not self._manager.is_alive():
                    return "dead"
                continue
            if found["parent_header"].get("msg_id") != message:
                continue
            kind, content = found["msg_type"], found["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return status
            if kind == "error":
                status = "error"
            if clip is not None:
                clip.add(_readable(kind, content))
        return "running"


def _readable(kind: str, content: dict[str, Any]) -> str:
    if kind == "stream":
        return str(content["text"])
    if kind in ("execute_result", "display_data"):
        return str(content["data"].get("text/plain", "")) + "\n"
    if kind == "error":
        return ANSI.sub("", "\n".join(content["traceback"])) + "\n"
    return ""


def run_bash(command: str, timeout_s: float, clip: Clip) -> tuple[str, str]:
    """Run a command line in a shell of its own; returns a status and a note."""
    shell = subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    assert shell.stdout is not None
    ended = _collect(shell, shell.stdout, time.monotonic() + timeout_s, clip)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    code = shell.wait()
    shell.stdout.close()
    if not ended:
        why = "wrote far too much" if clip.is_flooded else f"ran for {timeout_s:g} s"
        return "timeout", f"it {why} and was killed"
    return ("ok", "") if code == 0 else ("error", f"exit code {code}")


def _collect(
    shell: subprocess.Popen[bytes], stream: IO[bytes], deadline: float, clip: Clip
) -> bool:
    """Read what a shell writes until it ends, whatever it leaves in the background; False if it does not end."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while time.monotonic() < deadline and not clip.is_flooded:
            alive = shell.poll() is None
            events = selector.select(POLL_S if alive else 0)
            data = os.read(stream.fileno(), CHUNK) if events else b""
            clip.add(data.decode(errors="replace"))
            if not data and not alive:
                return True
            if events and not data:  # it ended, or closed its output and goes on
                with contextlib.suppress(subprocess.TimeoutExpired):
                    shell.wait(max(deadline - time.monotonic(), 0))
    return False


def kill_others(kept: set[int]) -> None:
    """Kill every process of this sandbox but the kept ones; those that fork meanwhile too."""
    for _ in range(SWEEPS):
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        others = pids - kept - {1, os.getpid()}
        if not others:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in others:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        time.sleep(0.01)


def put(path: str, data: str) -> tuple[str, str]:
    """Write a file; returns a status and a note."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(base64.b64decode(data))
    except OSError as error:
        return "error", str(error)
    return "ok", ""


def get(path: str, max_bytes: int) -> tuple[str, str]:
    """Read a file; returns a status, and its bytes in base64 or a note."""
    try:
        # A pipe would wait for who writes into it.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return "error", "it is no file"
            data = file.read(max_bytes + 1)
    except OSError as error:
        return "error", str(error)
    if len(data) > max_bytes:
        return "error", f"it has more than {max_bytes} bytes"
    return "ok", base64.b64encode(data).decode()


def answer(kernel: Kernel, request: dict[str, Any], *, isolated: bool) -> dict[str, Any]:
    """Do what a request asks for."""
    clip = Clip(request["keep"])
    match request["kind"]:
        case "python":
            status, note = kernel.run(request["text"], request["timeout_s"], clip)
        case "bash":
            status, note = run_bash(request["text"], request["timeout_s"], clip)
        case "put":
            status, note = put(request["path"], request["data"])
        case _:
            status, note = get(request["path"], request["max_bytes"])
    # Outside of a sandbox the processes of others would be among these.
    if isolated and status in ("timeout", "lost"):
        kill_others(set() if kernel.pid is None else {kernel.pid})
    return {"status": status, "text": clip.text(), "note": note}


def main() -> None:
    """Answer requests until there are none."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    isolated = sys.argv[1] == "isolated"
    kernel = Kernel()
    kernel.start()

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    reply({"status": "ok", "text": "", "note": ""})
    try:
        for line in requests:
            reply(answer(kernel, json.loads(line), isolated=isolated))
    finally:
        kernel.stop()


if __name__ == "__main__":
    main()
