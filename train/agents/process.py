"""A process inside the sandbox, seen from outside: started, watched, and killed with all that it started."""

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from train.agents import isolation, seccomp
from train.agents.isolation import Limits

WATCH_S = 0.05  # between two looks at the memory
INODE_BYTES = 1024  # of kernel memory that an empty file takes
START_S = 60.0
END_S = 10.0  # that what was killed may take to end


class SandboxError(Exception):
    """The sandbox failed, which says nothing of the code in it."""


class Process:
    """A command running inside; a context manager that leaves nothing behind.

    Args:
        argv: What to run, in the working folder.
        limits: For it.
        unsafe_local: Run it as this user instead, in a folder of its own; its memory is then limited by process only.
        files: Path in the working folder -> bytes.
        stdin: All that it can read; None leaves `stdin` open for writing.

    Attributes:
        stdin: Where it reads from, if that was not given.
        stdout: What it writes.
        stderr: What it writes there.
        out_of_memory: Whether it was killed for that.

    Raises:
        SandboxError: If it does not start.
    """

    def __init__(
        self,
        argv: Sequence[str],
        limits: Limits,
        *,
        unsafe_local: bool = False,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes | None = None,
    ) -> None:
        """Start it; the class docstring has the arguments."""
        self.out_of_memory = False
        self._limits = limits
        self._folder: Path | None = None
        self._status: int | None = None
        self._said = b""  # by bubblewrap
        self._first_fd: int | None = None  # of the sandbox's first process: all others die with it
        self._lock = threading.Lock()
        files = {isolation.checked_path(path): data for path, data in (files or {}).items()}
        with contextlib.ExitStack() as stack:
            source = subprocess.PIPE if stdin is None else _lend(stack, stdin)
            if unsafe_local:
                self._popen = self._start_unsafe(argv, files, source)
            else:
                gate, theirs = (stack.enter_context(end) for end in socket.socketpair())
                self._popen = self._start_isolated(stack, argv, files, source, theirs.fileno())
            self.stdin: IO[bytes] | None = self._popen.stdin
            assert self._popen.stdout is not None
            assert self._popen.stderr is not None
            self.stdout: IO[bytes] = self._popen.stdout
            self.stderr: IO[bytes] = self._popen.stderr
            if not unsafe_local:
                theirs.close()
                try:
                    self._pass_gate(gate)
                except BaseException:
                    self.close()
                    raise

    def _start_unsafe(
        self, argv: Sequence[str], files: Mapping[str, bytes], source: int
    ) -> subprocess.Popen[bytes]:
        self._folder = Path(tempfile.mkdtemp(prefix="unsafe_local_"))
        work = self._folder / "work"
        work.mkdir()
        for path, data in files.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_bytes(data)
        command = isolation.limited_command(argv, self._limits, count_processes=False)
        env = isolation.environment(str(self._folder))
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder)
            popen = _start(command, stdin=source, cwd=work, env=env)
            undo.pop_all()
        return popen

    def _start_isolated(
        self,
        stack: contextlib.ExitStack,
        argv: Sequence[str],
        files: Mapping[str, bytes],
        source: int,
        gate_fd: int,
    ) -> subprocess.Popen[bytes]:
        filter_fd = _lend(stack, seccomp.make_filter())
        file_fds = {path: _lend(stack, data) for path, data in files.items()}
        self._status, status_fd = os.pipe()
        stack.callback(os.close, status_fd)
        command = isolation.isolated_command(
            argv,
            self._limits,
            filter_fd=filter_fd,
            status_fd=status_fd,
            gate_fd=gate_fd,
            files=file_fds,
        )
        fds = (filter_fd, status_fd, gate_fd, *file_fds.values())
        env = isolation.environment(isolation.TMP)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._status)
            popen = _start(command, stdin=source, cwd="/", env=env, pass_fds=fds)
            undo.pop_all()
        return popen

    def __enter__(self) -> "Process":
        """Return the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it, and remove its files."""
        self.close()

    def is_alive(self) -> bool:
        """Return whether it still runs."""
        try:
            # Not reaped, so that nobody else can have its number when `kill` uses it.
            options = os.WEXITED | os.WNOWAIT | os.WNOHANG
            return os.waitid(os.P_PID, self._popen.pid, options) is None
        except ChildProcessError:
            return False

    def wait(self) -> int:
        """Wait for its end, and kill what it leaves behind.

        Returns:
            Its exit code, 128 and the signal's number if a signal ended it.

        Raises:
            SandboxError: If the sandbox ended without having run it.
        """
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        code = self._popen.wait()
        if self._status is None:
            return code if code >= 0 else 128 - code
        while more := os.read(self._status, 4096):
            self._said += more
        for line in self._said.splitlines():
            if "exit-code" in (said := json.loads(line)):
                return int(said["exit-code"])
        raise SandboxError(f"the sandbox ended before its program did: {self._complaint()}")

    def kill(self) -> None:
        """Kill it and all that it started, and return when they are gone."""
        with self._lock:
            if self._first_fd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._first_fd, signal.SIGKILL)
                select.select(
                    [self._first_fd], [], [], END_S
                )  # its end comes after all the others'
            elif self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._popen.pid, signal.SIGKILL)
            try:
                self._popen.wait(END_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()

    def close(self) -> None:
        """Kill it, and remove its files; a second time does nothing."""
        self.kill()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        with self._lock:
            for fd in (self._status, self._first_fd):
                if fd is not None:
                    os.close(fd)
            self._status = self._first_fd = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _pass_gate(self, gate: socket.socket) -> None:
        """Wait until the sandbox is made, watch its memory, and let its program start."""
        assert self._status is not None
        deadline = time.monotonic() + START_S
        while b"\n" not in self._said and is_ready(self._status, deadline):
            if not (more := os.read(self._status, 4096)):
                break
            self._said += more
        first = 0
        if b"\n" in self._said:
            first = json.loads(self._said.partition(b"\n")[0])["child-pid"]
            with contextlib.suppress(ProcessLookupError):
                self._first_fd = os.pidfd_open(first)
        if not is_ready(gate.fileno(), deadline):
            raise SandboxError(f"the sandbox was not made in {START_S:g} s")
        if not gate.recv(1):
            self.kill()
            raise SandboxError(f"the sandbox was not made: {self._complaint()}")
        watch = threading.Thread(target=self._watch, args=(first,), daemon=True, name="sandbox")
        watch.start()
        gate.sendall(b"\n")

    def _complaint(self) -> str:
        os.set_blocking(self.stderr.fileno(), False)
        said = (self.stderr.read() or b"").decode(errors="replace").split()
        return " ".join(said) or f"exit code {self._popen.returncode}"

    def _watch(self, first: int) -> None:
        limit = self._limits.memory_mib * 2**20
        while self.is_alive():
            if _exceeds(Path(f"/proc/{first}/root"), limit):
                self.out_of_memory = True
                self.kill()
            time.sleep(WATCH_S)


def _exceeds(root: Path, limit: int) -> bool:
    """Tell whether the processes of a sandbox take more memory than this; False where there are none.

    Args:
        root: Its root folder. What is read below it are mounts that nobody inside can replace.
        limit: In bytes; pages that processes share count once, files only by their number.
    """
    try:
        files = os.statvfs(root / isolation.TMP[1:])
        pids = [name for name in os.listdir(root / "proc") if name.isdecimal()]
    except OSError:
        return False
    used = (files.f_files - files.f_ffree) * INODE_BYTES
    if used + sum(_resident(root / "proc" / pid) for pid in pids) <= limit:
        return False
    return used + sum(_own_share(root / "proc" / pid) for pid in pids) > limit


def _resident(process: Path) -> int:
    """Return a process's memory, shared pages included, which is quick."""
    try:
        return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it ended
        return 0


def _own_share(process: Path) -> int:
    """Return a process's memory, shared pages divided among who shares them."""
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """Return a thread that lives as long as this program: bubblewrap dies with the thread that started it."""
    return ThreadPoolExecutor(1, "sandbox-starter")


def _start(
    command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; unbuffered, as others poll the descriptors."""
    popen: functools.partial[subprocess.Popen[bytes]] = functools.partial(
        subprocess.Popen, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        start_new_session=True, pass_fds=pass_fds, **options,
    )  # fmt: skip
    try:
        return _starter().submit(popen).result()
    except OSError as error:
        raise SandboxError(f"the sandbox does not start: {error}") from error


def is_ready(fd: int, deadline: float, *, writing: bool = False) -> bool:
    """Wait until a descriptor can be read or written, or its other side is closed.

    Args:
        fd: The descriptor.
        deadline: Of `time.monotonic`.
        writing: Whether it is to be written.

    Returns:
        False where the time is over first.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT if writing else select.POLLIN)
    return bool(poll.poll(1000 * max(deadline - time.monotonic(), 0)))


def _lend(stack: contextlib.ExitStack, data: bytes) -> int:
    """Return a descriptor of bytes that the stack closes."""
    fd = isolation.make_file(data)
    stack.callback(os.close, fd)
    return fd
