"""How code of a model is kept apart from the host: a bubblewrap command, limits, and whether they work here."""

import fcntl
import functools
import logging
import math
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dsv32_jax.config import require
from dsv32_jax.errors import UsageError
from train.agents import seccomp

logger = logging.getLogger(__name__)

TMP = "/tmp"  # all that can be written, in memory
WORK = f"{TMP}/work"  # where code starts
SHM_BYTES = 16 * 2**20  # of /dev/shm, for semaphores
OPEN_FILES = 256
ADDRESS_SPACE_MIB = 1024  # beyond the memory: reserved by libraries and threads, and never touched
NICENESS = 10
MANY_USERS = 2**16  # fewer are not worth drawing from
PROGRAMS = ("bwrap", "prlimit", "setpriv", "choom", "nice", "bash")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types")
PROBE_S = 30.0
ALONE = (
    "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
)  # fmt: skip
NEW_USER = ("--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000")
MAY_CHANGE_USER = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
# bubblewrap binds its life to ours only once the sandbox is made; should we die before that, nothing must run in it.
GATE = 'echo >&{fd}; read -r go <&{fd} || exit 125; exec "$@" {fd}>&-'
INSTALL = "On Debian: apt-get install bubblewrap libseccomp2 util-linux"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a sandbox may use.

    Attributes:
        memory_mib: Memory of all processes together; beyond it the sandbox is killed. An allocation of 1 GiB more than
            that fails in the process.
        disk_mib: Files, which are in memory too and come on top of it.
        processes: Processes and threads at a time.
        cpu_s: Seconds of computing of each process.
        output_bytes: That are kept of what a call writes.
    """

    memory_mib: int = 1024
    disk_mib: int = 256
    processes: int = 128
    cpu_s: float = 3600.0
    output_bytes: int = 65_536

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.memory_mib >= 64, f"memory_mib={self.memory_mib} must be at least 64")
        require(self.disk_mib >= 1, f"disk_mib={self.disk_mib} must be at least 1")
        require(self.processes >= 2, f"processes={self.processes} must be at least 2")
        require(self.cpu_s > 0, f"cpu_s={self.cpu_s:g} must be positive")
        require(self.output_bytes >= 256, f"output_bytes={self.output_bytes} must be at least 256")


def require_isolation(*, unsafe_local: bool = False) -> None:
    """Refuse to go on where code of a model can not be isolated.

    Args:
        unsafe_local: Run it all the same, as this user, with its files and network.

    Raises:
        UsageError: If it can not be isolated, or this is no Linux: says what is missing.
    """
    if sys.platform != "linux":
        raise UsageError(f"code of a model runs on Linux only, and this is {sys.platform}")
    if unsafe_local:
        logger.warning("unsafe_local=true: code of a model runs as this user, with no isolation")
    elif (problem := find_problem()) is not None:
        raise UsageError(
            f"code of a model can not be isolated here: {problem}. unsafe_local=true runs it unprotected"
        )


@functools.cache
def find_problem() -> str | None:
    """Return why nothing can be isolated on this machine, or None; tried once, by running the interpreter inside."""
    path = environment(TMP)["PATH"]
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not found. {INSTALL}"
    try:
        rules = seccomp.make_filter()
    except OSError as error:
        return f"{error}. {INSTALL}"
    fd = make_file(rules)
    command = isolated_command([sys.executable, "-I", "-c", ""], Limits(), filter_fd=fd)
    try:
        ended = subprocess.run(
            command, env=environment(TMP), pass_fds=(fd,), capture_output=True, timeout=PROBE_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"an empty program did not end in {PROBE_S:g} s"
    finally:
        os.close(fd)
    said = " ".join(ended.stderr.decode(errors="replace").split())
    return None if ended.returncode == 0 else f"bubblewrap does not work here ({said})"


def isolated_command(
    argv: Sequence[str],
    limits: Limits,
    *,
    filter_fd: int,
    status_fd: int | None = None,
    gate_fd: int | None = None,
    files: Mapping[str, int] | None = None,
) -> list[str]:
    """Return the command that runs another one inside.

    It sees /usr and the interpreter's own folders, both read-only, and an empty /tmp; no other file of the host, no
    network and no process but its own. As root it runs under a user id that nothing else has, otherwise in a user
    namespace; either way without capabilities.

    Args:
        argv: What to run, in `WORK`.
        limits: For it.
        filter_fd: A descriptor that holds `seccomp.make_filter`.
        status_fd: Where bubblewrap writes the pid of the first process, and the exit code; None for nowhere.
        gate_fd: A socket that a line comes out of when the sandbox is made, and into which one goes to start the
            command; it does not start where the other side is closed first. None starts it at once.
        files: Path in `WORK` -> descriptor that holds its bytes, each checked by `checked_path`.
    """
    user = _unused_user()
    command = ["choom", "-n", "1000", "--", "nice", "-n", str(NICENESS), "bwrap"]
    command += [*ALONE, *(NEW_USER if user is None else MAY_CHANGE_USER)]
    command += [*_mounts(limits.disk_mib, files or {}), "--seccomp", str(filter_fd)]
    if status_fd is not None:
        command += ["--json-status-fd", str(status_fd)]
    command += ["--"]
    if user is not None:
        command += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        command += ["--inh-caps=-all", "--no-new-privs"]
    if gate_fd is not None:
        argv = ["bash", "-c", GATE.format(fd=gate_fd), "gate", *argv]
    return command + limited_command(argv, limits)


def _mounts(disk_mib: int, files: Mapping[str, int]) -> list[str]:
    """Return what makes the folders inside; those that bubblewrap makes by itself could not be entered."""
    command = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        else:
            command += ["--ro-bind-try", f"/{name}", f"/{name}"]
    command += ["--perms", "0755", "--dir", "/etc"]
    for name in ETC:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    command += ["--perms", "1777", "--size", str(disk_mib * 2**20), "--tmpfs", TMP]
    for folder in _interpreter_folders():  # after /tmp, where a virtual environment may lie
        for parent in [*PurePosixPath(folder).parents][-2::-1]:
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", folder, folder]
    command += ["--dev", "/dev", "--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]
    command += ["--proc", "/proc", "--perms", "0777", "--dir", WORK]
    for path, fd in files.items():
        for parent in [*PurePosixPath(path).parents][-2::-1]:
            command += ["--perms", "0777", "--dir", f"{WORK}/{parent}"]
        command += ["--perms", "0666", "--file", str(fd), f"{WORK}/{path}"]
    return [*command, "--chdir", WORK, "--remount-ro", "/dev", "--remount-ro", "/"]


def limited_command(
    argv: Sequence[str], limits: Limits, *, count_processes: bool = True
) -> list[str]:
    """Return the command that runs another one with the limits that each process carries.

    Args:
        argv: What to run.
        limits: For it.
        count_processes: Limit these; they are counted by user, so only for one that nothing else has.
    """
    cpu_s = math.ceil(limits.cpu_s)
    values: dict[str, int | str] = {
        "as": (limits.memory_mib + ADDRESS_SPACE_MIB) * 2**20,
        "core": 0,
        "cpu": f"{cpu_s}:{cpu_s + 1}",  # a signal of its own, by which it is told from other ends
        "fsize": limits.disk_mib * 2**20,
        "memlock": 0,
        "msgqueue": 0,
        "nofile": OPEN_FILES,
    }
    if count_processes:
        values["nproc"] = limits.processes
    return ["prlimit", *(f"--{name}={value}" for name, value in values.items()), "--", *argv]


def environment(tmp: str) -> dict[str, str]:
    """Return all the variables that code sees; none comes from the host's.

    Args:
        tmp: The folder for files, with a folder `work` in it.
    """
    found = {"HOME": f"{tmp}/work", "TMPDIR": tmp, "USER": "sandbox", "LANG": "C.UTF-8"}
    found |= {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
    found |= {"IPYTHONDIR": f"{tmp}/.ipython", "PYTHONDONTWRITEBYTECODE": "1"}
    found |= {f"JUPYTER_{name}_DIR": f"{tmp}/.jupyter" for name in ("CONFIG", "DATA", "RUNTIME")}
    # The folder for files may be another user's than the code's, which git takes for an attack.
    git = {"COUNT": "1", "KEY_0": "safe.directory", "VALUE_0": "*"}
    found |= {f"GIT_CONFIG_{name}": value for name, value in git.items()}
    # Memory and threads as for a small machine, whatever the host has.
    found |= {f"{name}_NUM_THREADS": "2" for name in ("OMP", "OPENBLAS", "MKL")}
    return found | {"MALLOC_ARENA_MAX": "2"}


def make_file(data: bytes) -> int:
    """Return a descriptor of bytes that nobody can change, at their start."""
    fd = os.memfd_create("sandbox", os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def checked_path(path: str) -> str:
    """Return a path below the working folder as it is.

    Args:
        path: Such as `data/table.csv`.

    Returns:
        The same.

    Raises:
        ValueError: If it is absolute, empty, or leads out.
    """
    parts = PurePosixPath(path).parts
    good = bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path
    require(good, f"{path!r} must be a path inside the working folder")
    return path


def _interpreter_folders() -> list[str]:
    """Return what the interpreter needs beyond /usr."""
    folders = dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))
    return [folder for folder in folders if folder != "/usr" and not folder.startswith("/usr/")]


def _unused_user() -> int | None:
    """Return a user id that nobody has, as limits of processes and signals go by it; None where none can be taken."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    top = min(max(first + count for first, _, count in ranges), 2**31)
    if os.geteuid() != 0 or top < MANY_USERS:
        return None
    return top // 2 + secrets.randbelow(top // 2 - 2)
