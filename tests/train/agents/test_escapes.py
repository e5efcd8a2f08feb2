# ruff: noqa: E501 - programs in strings
"""Attacks on the sandbox, as a program in it would try them. Each names what it got; that must be nothing."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from train.agents import isolation, runs, seccomp
from train.agents.isolation import Limits

pytestmark = pytest.mark.usefixtures("_isolated")

SECRET = "a-secret-of-the-host-3f9c1"


def attack(program, *, timeout_s=20.0, limits=None, **values):
    """Run a program inside; `values` are its variables. Returns how it ended, and what it wrote."""
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    source = given + textwrap.dedent(program)
    argv = [sys.executable, "-I", "-c", source]
    result = runs.run(argv, limits=limits or Limits(memory_mib=256), timeout_s=timeout_s)
    return result, result.stdout.decode()


def attack_until_end(program, **values):
    """The same, for one that should end by itself."""
    result, text = attack(program, **values)
    assert (result.ended, result.exit_code, result.stderr) == ("exited", 0, b"")
    return text


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(SECRET)
    path.chmod(0o644)
    return path


def test_variables_of_the_host_are_not_seen(monkeypatch):
    monkeypatch.setenv("HOST_TOKEN", SECRET)
    program = """
        import glob, os
        print(dict(os.environ))
        for path in glob.glob("/proc/*/environ"):
            try: print(open(path).read())
            except OSError: pass
    """

    text = attack_until_end(program)

    assert "USER" in text
    assert SECRET not in text


def test_files_of_the_host_are_not_read(secret_file):
    program = """
        import os
        places = ["", "/proc/1/root", "/proc/self/root", "/proc/1/cwd", "/proc/2/root", "/oldroot", "/newroot"]
        places += ["/proc/self/cwd/../../../../../..", "/dev/fd/0/..", "/proc/self/fd/0/../.."]
        for place in places:
            for path in (secret, keys, "/etc/shadow", "/etc/passwd", "/home", "/var", "/run", "/sys", "/boot"):
                try: print("read", place + path, os.listdir(place + path) if os.path.isdir(place + path) else open(place + path).read())
                except OSError: pass
    """

    keys = os.path.expanduser("~/.ssh")
    assert attack_until_end(program, secret=str(secret_file), keys=keys) == ""


def test_no_file_outside_of_tmp_has_what_only_the_host_knows(secret_file):
    program = """
        import os
        for folder, folders, names in os.walk("/"):
            folders[:] = [f for f in folders if (folder, f) not in [("/", "proc"), ("/", "usr")]]
            print(*[name for name in names if name == "token"], end="")
    """

    assert attack_until_end(program) == ""


def test_links_lead_to_nothing_of_the_host(secret_file):
    program = """
        import os
        for target in (secret, "/proc/1/root" + secret, "/etc/shadow"):
            os.symlink(target, "link")
            for flags in (os.O_RDONLY, os.O_WRONLY):
                try: os.open("link", flags); print("opened", target)
                except OSError: pass
            try: os.link(target, "hard"); print("linked", target)
            except OSError: pass
            os.unlink("link")
    """

    assert attack_until_end(program, secret=str(secret_file)) == ""


def test_nothing_is_written_but_in_tmp(secret_file):
    program = """
        import os, sys
        places = ["/", "/usr", "/usr/bin", "/usr/local", "/etc", "/dev", "/proc", "/proc/sys/kernel", "/root", "/home", "/bin"]
        places += [sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), os.path.dirname(secret), "/sys", "/var", "/run"]
        for place in places:
            try: open(place + "/x", "w"); print("wrote", place)
            except OSError: pass
            try: os.mkdir(place + "/y"); print("made", place)
            except OSError: pass
        paths = [sys.executable, os.__file__, "/bin/sh", "/etc/ld.so.cache", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern"]
        paths += ["/proc/self/uid_map", "/proc/1/mem", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/proc/1/oom_score_adj"]
        for path in paths:
            for action in (lambda: open(path, "ab"), lambda: os.unlink(path), lambda: os.chmod(path, 0o777)):
                try: action(); print("changed", path)
                except OSError: pass
        open("/tmp/x", "w"), open("x", "w"), open("/dev/null", "w"), open("/dev/shm/x", "w")
    """

    assert attack_until_end(program, secret=str(secret_file)) == ""


def test_nothing_is_mounted_for_writing_but_memory():
    program = """
        for line in open("/proc/self/mounts"):
            kind, place, options = line.split()[0], line.split()[1], line.split()[3].split(",")
            if "rw" in options and not place.startswith(("/proc", "/dev/")): print(kind, place)
            if "nosuid" not in options: print("suid", place)
    """

    assert attack_until_end(program) == "tmpfs /tmp\n"


def test_no_network_is_reached():
    reached, name = threading.Event(), f"\0{SECRET}-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        for one in (server, local):
            threading.Thread(target=lambda s=one: (s.accept(), reached.set()), daemon=True).start()
        program = """
            import socket
            def try_to(name, action):
                try: action(); print("reached", name)
                except OSError: pass
            tries = [("127.0.0.1", port), ("8.8.8.8", 53), ("169.254.169.254", 80), ("10.0.2.2", 22), ("::1", port)]
            for place in tries:
                try_to(place, lambda: socket.create_connection(place, 1))
            try_to("abstract", lambda: socket.socket(socket.AF_UNIX).connect(name))
            try_to("names", lambda: socket.getaddrinfo("example.com", 80))
            for cid in (0, 1, 2, 3):
                try_to("vsock", lambda: socket.socket(40, socket.SOCK_STREAM).connect((cid, 1024)))
            try_to("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
            try_to("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
            try_to("crypto", lambda: socket.socket(38, 5))
            try_to("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)))
            try_to("audit", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9))
        """
        port = server.getsockname()[1]

        assert attack_until_end(program, port=port, name=name) == ""
        assert not reached.is_set()


def test_a_socket_file_of_the_host_is_not_reached(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        program = """
            import socket
            for place in ("", "/proc/1/root", "/proc/self/root"):
                try: socket.socket(socket.AF_UNIX).connect(place + path); print("reached")
                except OSError: pass
        """

        assert attack_until_end(program, path=str(tmp_path / "s")) == ""


def test_signals_reach_nobody_outside():
    victim = subprocess.Popen(["sleep", "60"])
    program = """
        import os, signal
        for pid in (victim, host):
            try: os.kill(pid, signal.SIGKILL); print("reached", pid)
            except ProcessLookupError: pass
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in (1, -1):
            try: os.kill(pid, signal.SIGTERM)
            except (PermissionError, ProcessLookupError): pass
    """
    try:
        assert attack_until_end(program, victim=victim.pid, host=os.getpid()) == ""
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_no_privilege_is_had_or_gained():
    program = """
        import ctypes, errno, os, resource, subprocess
        status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
        held = {name: status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(status[name], 16)}
        if held or status["NoNewPrivs"] != "1" or status["Seccomp"] != "2" or os.getuid() == 0 or 0 in os.getgroups():
            print("has", held, status["NoNewPrivs"], status["Seccomp"], os.getuid(), os.getgroups())
        libc = ctypes.CDLL(None, use_errno=True)
        calls = {
            "unshare user": lambda: libc.unshare(0x10000000), "unshare mount": lambda: libc.unshare(0x20000),
            "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), "umount": lambda: libc.umount2(b"/proc", 2),
            "chroot": lambda: libc.chroot(b"/tmp"), "setuid": lambda: libc.setuid(0), "setgid": lambda: libc.setgid(0),
            "mknod": lambda: libc.mknod(b"/tmp/disk", 0o60600, 254 << 8), "ptrace": lambda: libc.ptrace(16, os.getppid(), 0, 0),
            "clone user": lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), "memfd": lambda: libc.memfd_create(b"x", 0),
            "shm": lambda: libc.shmget(0, 4096, 0o1600), "bpf": lambda: libc.syscall(321, 0, 0, 0),
            "io_uring": lambda: libc.syscall(425, 1, 0), "userfaultfd": lambda: libc.syscall(323, 0),
            "perf": lambda: libc.syscall(298, 0, 0, -1, -1, 0), "handle": lambda: libc.syscall(304, 0, 0, 0),
        }
        for name, call in calls.items():
            if call() != -1: print("could", name)
            elif ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS): print(name, os.strerror(ctypes.get_errno()))
        for path in ("/proc/1/ns/mnt", "/proc/1/ns/net", "/proc/self/ns/user"):
            try:
                if libc.setns(os.open(path, os.O_RDONLY), 0) != -1: print("entered", path)
            except OSError: pass
        for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
            try: resource.setrlimit(limit, (resource.RLIM_INFINITY,) * 2); print("raised", limit)
            except (OSError, ValueError): pass
        for command in ("su -c id", "mount -t tmpfs none /tmp", "newgrp", "passwd -d root", "chsh -s /bin/sh", "nsenter -t 1 -a id"):
            done = subprocess.run(command.split(), capture_output=True, stdin=subprocess.DEVNULL)
            if done.returncode == 0: print("ran", command, done.stdout)
    """

    assert attack_until_end(program) == ""


def test_no_descriptor_of_the_host_is_inherited():
    text = attack_until_end("""
        import os
        for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
            try: print(fd, os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
            except OSError: pass
    """)

    assert text.split("\n") == ["0 /memfd", "1 pipe", "2 pipe", ""]


def test_what_it_reads_can_not_be_grown():
    program = """
        import os
        for action in (lambda: os.write(0, b"x" * 10), lambda: os.ftruncate(0, 1000), lambda: os.write(os.open("/dev/stdin", os.O_WRONLY), b"x")):
            try: action(); print("grew")
            except OSError: pass
    """

    assert attack_until_end(program) == ""


def test_a_fork_bomb_stays_small_and_ends(processes_with):
    marker = f"bomb-{os.getpid()}"
    program = """
        import os
        while True:
            try: os.fork()
            except OSError: pass
    """
    counts = []
    stop = threading.Event()

    def count():
        while not stop.wait(0.1):
            counts.append(len(processes_with(marker)))

    watcher = threading.Thread(target=count, daemon=True)
    watcher.start()
    argv = [sys.executable, "-I", "-c", textwrap.dedent(program), marker]
    result = runs.run(argv, limits=Limits(processes=30), timeout_s=2.0)
    stop.set()
    watcher.join()

    assert result.ended == "timeout"
    assert result.seconds < 6
    # bubblewrap's own two have the marker too.
    assert 10 < max(counts) <= 32
    assert processes_with(marker) == []


def test_the_limit_of_processes_is_each_sandbox_s_own():
    program = """
        import os, time
        made = 0
        for _ in range(12):
            if os.fork() == 0: time.sleep(2); os._exit(0)
            made += 1
        print(made)
    """
    found = []
    one = lambda: found.append(attack(program, limits=Limits(processes=20))[1])  # noqa: E731
    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == ["12\n"] * 3


@pytest.mark.parametrize(
    "program",
    [
        "while True: kept.append(bytearray(2**20))",
        "kept = [os.fork() for _ in range(4)]\nwhile True: kept.append(bytearray(2**20))",
        "m = mmap.mmap(-1, 2**29, mmap.MAP_SHARED)\nfor i in range(0, 2**29, 4096): m[i] = 1\nos.fork()\ntime.sleep(9)",
        "for i in range(10**7): os.close(os.open(f'/tmp/{i}', os.O_CREAT))",
    ],
    ids=["one", "many", "shared", "empty files"],
)
def test_a_memory_bomb_is_killed(program):
    source = "import mmap, os, time\nkept = []\n" + program
    limits = Limits(memory_mib=128, disk_mib=1024)
    result, _ = attack(source, limits=limits, timeout_s=40.0)

    assert result.ended == "memory", result
    assert result.seconds < 30


def test_memory_that_is_shared_counts_once():
    program = """
        import os, time
        kept = bytearray(os.urandom(1)) * (60 * 2**20)
        children = [os.fork() for _ in range(1)] + [os.fork(), os.fork()]
        time.sleep(0.5)
    """
    result, _ = attack(program, limits=Limits(memory_mib=256))

    assert result.ended == "exited"


def test_one_huge_allocation_fails_in_the_program():
    text = attack_until_end("""
        try: bytearray(2**33)
        except MemoryError: print("no")
    """)

    assert text == "no\n"


def test_files_are_limited():
    program = """
        written = 0
        try:
            for place in ("/tmp", "/dev/shm"):
                for i in range(100):
                    with open(f"{place}/{i}", "wb") as file:
                        written += file.write(bytes(2**20))
        except OSError: pass
        try: open("/tmp/one", "wb").truncate(2**40); print("sparse")
        except OSError: pass
        print(written // 2**20 <= 8)
    """
    result, text = attack(program, limits=Limits(disk_mib=8))

    assert (result.exit_code, text) == (0, "True\n")


def test_endless_output_ends_it():
    result, text = attack("while True: print('y' * 1000)", limits=Limits(output_bytes=10_000))

    assert (result.ended, len(text)) == ("output", 10_000)


def test_endless_complaints_are_not_kept():
    program = "import sys\nwhile True: sys.stderr.write('y' * 1000)"
    result, _ = attack(program, timeout_s=1.0, limits=Limits(output_bytes=10_000))

    assert (result.ended, len(result.stderr)) == ("timeout", 10_000)


def test_endless_computing_ends():
    result, _ = attack("while True: pass", limits=Limits(cpu_s=1.0))

    assert result.ended == "timeout"
    assert result.seconds < 10


def test_who_ignores_signals_and_closes_its_output_ends():
    program = """
        import os, signal, time
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        os.close(1), os.close(2)
        while True: time.sleep(1)
    """
    result, _ = attack(program, timeout_s=1.0)

    assert result.ended == "timeout"
    assert result.seconds < 5


def test_processes_left_behind_are_killed(processes_with):
    marker = f"9999.{os.getpid()}"
    program = """
        import os, subprocess, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                subprocess.Popen(["sleep", marker], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, start_new_session=True)
                time.sleep(60)
            os._exit(0)
        time.sleep(0.5)
        print("left")
    """

    assert attack_until_end(program, marker=marker) == "left\n"
    assert processes_with(marker) == []


def test_all_ends_with_the_program_that_started_it(processes_with):
    marker = f"8888.{os.getpid()}"
    program = f"""
        from train.agents import runs
        from train.agents.session import Session
        import threading
        if __name__ == "__main__":
            session = Session()
            session.bash("setsid sleep {marker} > /dev/null 2>&1 < /dev/null &")
            run = lambda: runs.run(["sleep", "{marker}"], timeout_s=60.0)
            threading.Thread(target=run, daemon=True).start()
            print("ready", flush=True)
            threading.Event().wait()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 10
        while len(processes_with(marker, "sleep")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(processes_with(marker, "sleep")) == 2
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 10
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert processes_with(marker) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run it as this user already")
def test_without_root_a_user_namespace_does_the_same(monkeypatch, secret_file):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(isolation, "_interpreter_folders", list)  # which others may not read
    fd = isolation.make_file(seccomp.make_filter())
    script = f"""
        cat {secret_file} && echo read
        cd /proc/1/root && cat ./{secret_file} && echo read
        cd /
        unshare -U true && echo namespace
        for place in / /usr /dev /etc; do touch $place/x && echo wrote; done
        kill -0 {os.getpid()} && echo signal
        (echo > /dev/tcp/127.0.0.1/22) && echo network
        grep -q 'CapEff:.0*$' /proc/self/status || echo privileged
        [ "$(ulimit -u)" = 20 ] || echo unlimited
        (ulimit -u 21) && echo raised
    """
    command = isolation.isolated_command(["bash", "-c", script], Limits(processes=20), filter_fd=fd)
    lowered = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    try:
        done = subprocess.run(
            lowered, pass_fds=(fd,), env=isolation.environment("/tmp"), capture_output=True, check=False
        )  # fmt: skip
    finally:
        os.close(fd)

    assert done.stdout == b"", done.stderr
