"""Keep what an answer makes a verifier evaluate from touching files, processes and the network.

Several families of reasoning-gym, and sympy's parser, evaluate text as Python. An audit hook of the interpreter refuses
what would leave the process. It stops what a policy may stumble on; it is no sandbox for code that attacks it, and
reading files stays possible, as imports need it.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED = (
    "subprocess.", "socket.", "shutil.", "ctypes.", "urllib.", "sqlite3.", "pty.", "gc.", "mmap.",
    "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "os.remove", "os.rename", "os.rmdir",
    "os.mkdir", "os.chmod", "os.chown", "os.chdir", "os.link", "os.symlink", "os.truncate", "os.utime", "os.putenv",
    "os.unsetenv", "resource.setrlimit", "sys.settrace", "sys.setprofile", "builtins.input", "builtins.breakpoint",
)  # fmt: skip

_closed = False


class FenceError(PermissionError):
    """An answer was evaluated and tried to leave the process."""


def install() -> None:
    """Add the hook to this process, for good; it does nothing outside of `closed()`."""
    sys.dont_write_bytecode = True  # so that an import inside writes nothing
    sys.addaudithook(_refuse)


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Refuse what leaves the process while the block runs; needs `install()`."""
    global _closed
    _closed = True
    try:
        yield
    finally:
        _closed = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _closed:
        return
    if event.startswith(REFUSED) or (event == "open" and int(arguments[2] or 0) & WRITING):
        raise FenceError(f"an answer was evaluated and tried {event}{arguments[:1]}")
